"""Two processes never write into one run directory."""

import pytest

from themis.core.errors import ConfigError
from themis.train.run_lock import exclusive


def test_a_second_user_is_refused_and_the_next_is_not(tmp_path):
    with exclusive(tmp_path), pytest.raises(ConfigError, match="in use by another process"), exclusive(tmp_path):
        pass
    with exclusive(tmp_path):
        assert not list(tmp_path.iterdir())
