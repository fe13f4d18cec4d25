"""Digests: every configuration of a table has a line, and a line changes with the machine code."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tilenorm import tools
from tilenorm.__main__ import main
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.target import TARGETS, Target
from tilenorm.launch.toolchain import compiler_version, package_version
from tilenorm.launch.tuned.tables import TABLES
from tilenorm.spec import NormSpec
from tilenorm.tools.dev import digests
from tilenorm.tools.dev.digests import Case

TARGET = Target.of("sm_90")
RMS = NormSpec("rms", 128, "bfloat16", "bfloat16")
CASES = [
    Case(RMS, TARGET, 1000, save=False),
    Case(replace(RMS, norm="layer"), TARGET, 1000, save=False),
    Case(RMS, TARGET, 1000, needs=every_gradient(RMS)),
]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("arch", TABLES)
def test_every_configuration_of_a_table_has_a_case(arch, direction):
    tables = getattr(TABLES[arch], direction)
    sizes = {(len(row), key) for key, row in tables.items()}
    found = [c for c in digests.cases(arch) if (c.needs is None) == (direction == "forward")]
    configured = {(c.spec.widest_item, c.spec.hidden, c.plan.config) for c in found}
    missing = [
        (key, hidden)
        for key, table in tables.items()
        for hidden, config in table
        if config is not None and (key[1], hidden, config) not in configured
    ]
    assert sizes and not missing


def test_tools_for_users_import_nothing_for_contributors():
    for path in Path(tools.__path__[0]).glob("*.py"):
        assert "dev" not in re.findall(r"^ *from \.(\w*)", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize("arch", TARGETS)
def test_lines_are_told_apart(arch):
    labels = [str(case) for case in digests.cases(arch)]
    assert labels and len(set(labels)) == len(labels)


def test_a_line_for_each_launch(monkeypatch, capsys):
    monkeypatch.setattr(digests, "cases", lambda arch: CASES)
    assert main(["digests", "--arch", "sm_90", "--processes", "1"]) == 0
    compiler, *lines = capsys.readouterr().out.splitlines()
    assert compiler == f"# tileiras {compiler_version()} cuda-tile {package_version('cuda-tile')}"
    assert [line.rsplit(" ", 2)[1:][0] for line in lines] == ["launch:0"] * 3 + ["launch:1"]
    assert lines[0].startswith("sm_90 forward rms_norm 128 bfloat16 (weight bfloat16, ")
    codes = [line.split()[-1] for line in lines]
    assert len(set(codes)) == 4 and all(len(code) == digests.DIGITS for code in codes)
    assert list(digests.digests("sm_90", 1)) == [compiler, *lines], (
        "the same code has the same digest"
    )
