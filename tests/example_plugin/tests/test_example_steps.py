"""The example's step passes what the built-in ones pass."""

from prepare.testing import StepContract


class TestEmbeddingsInBfloat16(StepContract):
    step = "embeddings_in_bfloat16"
