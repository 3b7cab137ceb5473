import numpy as np
import pytest
import torch

from themis.core.errors import ConfigError
from themis.train.evaluate import inputs_and_targets


@pytest.mark.parametrize(("token", "message"), [(-1, "token -1; tokens must be 0 or more"), (8, "token 8; with model")])
def test_tokens_the_model_does_not_know_are_refused(token, message):
    with pytest.raises(ConfigError, match=message):
        inputs_and_targets(np.array([[1, token, 2]]), 8, torch.device("cpu"))
