from __future__ import annotations

import pytest

from themis.core.errors import CheckpointError, ConfigError, PeerError, ThemisError, reject, require


def test_require_names_argument_given_and_wanted():
    require(True, "budget", -1, "0 or more")
    with pytest.raises(ConfigError, match=r"^budget is -1; it must be 0 or more$"):
        require(False, "budget", -1, "0 or more")
    with pytest.raises(ConfigError, match=r"^load_E is of shape \(2, 3\); it must be one-dimensional$"):
        reject("load_E", "of shape (2, 3)", "one-dimensional")


def test_one_base_and_the_builtin_kin():
    assert issubclass(ConfigError, ThemisError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(CheckpointError, ThemisError)
    assert PeerError("rank 3 is silent", (3,)).ranks == (3,)
