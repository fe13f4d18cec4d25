"""Machines whose user has no home folder: nothing is read or written there, and calls work. What a
variable asks for."""

import os
import pwd
from pathlib import Path

import pytest
import torch

import tilenorm
from tilenorm.launch import user_table
from tilenorm.launch.heuristics import source
from tilenorm.launch.target import Target
from tilenorm.settings import settings
from tilenorm.spec import NormSpec
from tilenorm.tools import info

SPEC = NormSpec("rms", 4096, "bfloat16", "bfloat16")


@pytest.fixture
def no_home(monkeypatch, tables):
    """As in a container that runs as a user without an entry in its list of users."""

    def unknown(user):
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "TILENORM_CACHE_DIR", "TILENORM_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_calls_work(no_home):
    x = torch.ones(2, 8, requires_grad=True)
    tilenorm.rms_norm(x, (8,)).sum().backward()
    assert settings().tables is None


def test_plans_read_no_table(no_home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source(SPEC, Target.of("sm_90")) == "tuned/sm_90"
    assert not os.listdir()


def test_tables_have_no_place(no_home):
    with pytest.raises(FileNotFoundError, match="set TILENORM_CACHE_DIR to a folder"):
        user_table.path_of("sm_90")


def test_info_works(no_home):
    lines, _ = info.information()
    assert not any("user table" in line for line in lines)


@pytest.mark.parametrize(
    "name, value, folder",
    [
        ("HOME", "/home/a", "/home/a/.cache/tilenorm"),
        ("XDG_CACHE_HOME", "/b", "/b/tilenorm"),
        ("TILENORM_CACHE_DIR", "/c", "/c"),
    ],
)
def test_a_folder_that_a_variable_names(no_home, monkeypatch, name, value, folder):
    monkeypatch.setenv(name, value)
    assert settings().tables == Path(folder)


@pytest.mark.parametrize("value, asked", [("1", True), ("0", False), ("", False)])
def test_one_result_is_asked_for(monkeypatch, value, asked):
    monkeypatch.delenv("TILENORM_ONE_RESULT", raising=False)
    assert not settings().one_result
    monkeypatch.setenv("TILENORM_ONE_RESULT", value)
    assert settings().one_result is asked
