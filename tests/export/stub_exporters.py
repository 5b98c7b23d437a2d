"""Exporters that write a model in a second and answer in chosen ways, without torch.export."""

import json
import os
from typing import ClassVar

import torch

from prepare.stages.export import Exporter


class Stub(Exporter):
    """Write the modules as a pickle; the artefact answers as the model does."""

    suffix: ClassVar[str] = ".stub"
    keeps: ClassVar[tuple[str, ...]] = ("input_format", "repair_layout", "keep_layout")

    def capture(self, model, call):
        return model

    def run_captured(self, program):
        return program

    def lower(self, program, metadata):
        model = getattr(program, "model", program)  # without the wrapper, whose function is local
        return {"model": model, "dtype": next(model.parameters()).dtype, "stored": dict(metadata)}

    def write(self, lowered, path, metadata):
        torch.save(lowered, path)

    def load(self, path):
        kept = torch.load(path, weights_only=False)
        self.check(kept)
        model = kept["model"]

        def call(args, kwargs):
            args = tuple(self.taken(each, kept) for each in args)
            return model(*(each.to(kept["dtype"]) for each in args), **kwargs)

        return call

    def check(self, kept):
        pass

    def taken(self, tensor, kept):
        return tensor

    def metadata(self, path):
        return torch.load(path, weights_only=False)["stored"]


class IgnoresStrides(Stub):
    """Read the numbers in the order of memory, as code that was compiled for contiguous inputs does."""

    def taken(self, tensor, kept):
        return torch.as_strided(tensor, tensor.shape, tensor.contiguous().stride())


class RequiresContiguous(IgnoresStrides):
    """Read the numbers in the order of memory; the contract may require contiguous inputs."""

    contiguous_weights: ClassVar[bool] = True
    layout_remedy: ClassVar[str] = "promise contiguous inputs"
    promised: bool = False

    @property
    def requires_contiguous(self):
        return self.promised


class RefusesStrides(Stub):
    """Take contiguous inputs only, and say so."""

    def taken(self, tensor, kept):
        if not tensor.is_contiguous():
            raise ValueError(f"strides {tensor.stride()} are not contiguous")
        return tensor


class RefusesAll(Stub):
    def taken(self, tensor, kept):
        raise ValueError("the input is not supported")


class OneBatch(Stub):
    """Take the batch of 3 only."""

    def taken(self, tensor, kept):
        if len(tensor) != 3:
            raise ValueError("the batch has to be 3")
        return tensor


class OneHeight(Stub):
    """Take the height of 8 only."""

    def taken(self, tensor, kept):
        if tensor.shape[2] != 8:
            raise ValueError("the height has to be 8")
        return tensor


class Dies(Stub):
    def taken(self, tensor, kept):
        if not tensor.is_contiguous():
            os._exit(7)
        return tensor


class CannotLower(Stub):
    def lower(self, program, metadata):
        raise NotImplementedError("no operator einsum")


class CannotLoad(Stub):
    def check(self, kept):
        raise OSError("no such library")


class NoRecipe(Stub):
    def metadata(self, path):
        return {}


class Lacking(Stub):
    packages: ClassVar[tuple[str, ...]] = ("no_such_package",)


class Listing(Stub):
    """Write a second file beside the artefact."""

    def write(self, lowered, path, metadata):
        super().write(lowered, path, metadata)
        path.with_suffix(".json").write_text(json.dumps(dict(metadata)))


STUBS = {
    cls.__name__: cls
    for cls in (Stub, IgnoresStrides, RequiresContiguous, RefusesStrides, RefusesAll, OneBatch, OneHeight, Dies, CannotLower,
                CannotLoad, NoRecipe, Lacking, Listing)
}  # fmt: skip
