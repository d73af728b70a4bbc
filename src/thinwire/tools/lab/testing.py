"""For tests that need a lab: skip where the system does not allow one, but never in CI."""

import functools
import os

import pytest

from thinwire.tools.lab.check import check, ready


@functools.cache
def why_no_lab() -> str | None:
    """Return why no lab with a rate can be built here, or None if one can."""
    abilities = check()
    if ready(abilities):
        return None
    return "; ".join(f"{each.name}: {each.detail}" for each in abilities if each.required and not each.works)


def require_lab() -> None:
    """Skip the calling test where no lab can be built; with CI=true in the environment, fail it instead."""
    reason = why_no_lab()
    if reason is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"no lab can be built, which CI must allow: {reason}")
    pytest.skip(f"no lab can be built here: {reason}")
