"""The one form of the message for an argument that an op does not take."""


def wrong(
    op: str, name: str, takes: str, got: object, kind: type[Exception] = RuntimeError
) -> Exception:
    """The exception for an argument that is not what an op takes."""
    return kind(f"{op}: argument {name!r} takes {takes}, got {got}")
