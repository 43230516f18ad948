"""Normal random weights made on the device, for models too large to write down and others whose tensors differ."""

from __future__ import annotations

from typing import Any

FORMAT = "normal"
"""The name of the load format."""


def install() -> None:
    """Let vLLM load such weights. They are scaled so that every layer passes on numbers of about the size it was given.

    An engine's own dummy weights are so small that a wrong block of KV hardly changes a token.
    """
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(FORMAT)
    class NormalLoader(DummyModelLoader):  # type: ignore[misc]
        """Fills the parameters in their order."""

        def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
            with torch.no_grad():
                for number, (name, parameter) in enumerate(model.named_parameters()):
                    torch.manual_seed(number)
                    _fill(name, parameter)


def _fill(name: str, parameter: Any) -> None:
    *_, layer, kind = ["", *name.split(".")]
    if kind == "A":  # a state forgets within a few tokens to hundreds
        parameter.uniform_(-1.0, -0.05)
    elif kind == "dt_bias":
        parameter.uniform_(-5.0, -1.0)
    elif kind == "bias":
        parameter.zero_()
    elif parameter.dim() < 2:
        parameter.fill_(1)
    elif layer in ("embed_tokens", "embeddings"):
        parameter.normal_()
    else:
        scale = 3 if layer.startswith(("q", "fused_q", "o_proj")) else 1  # so that single keys matter
        parameter.normal_(std=scale * parameter[0].numel() ** -0.5)
