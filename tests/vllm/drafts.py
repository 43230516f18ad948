"""Draft layers with random weights, for the small models of this package.

Each passes the model's last hidden state on, so that it mostly proposes the last token again, which is right at times,
and adds what its attention reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.vllm.engine import _MODEL, _shapes, make_model
from tests.vllm.models import make_family

_SCALE = 0.08


def make_eagle(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the small Llama and an EAGLE layer; return the model, and vLLM's configuration of its drafts."""
    draft = folder / "draft"
    draft.mkdir(parents=True)
    random = torch.Generator().manual_seed(1)
    width = _MODEL["hidden_size"]
    weights = {
        name.removeprefix("model."): torch.randn(shape, generator=random) * _SCALE
        for name, shape in _shapes(1)
        if ".layers." in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.cat((torch.zeros(width, width), torch.eye(width)), dim=1)
    save_file(weights, draft / "model.safetensors")
    (draft / "config.json").write_text(json.dumps(_MODEL | {"num_hidden_layers": 1}))
    return make_model(folder / "model"), {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}


def make_mtp(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a small DeepSeek V3 that has an MTP layer behind its others; return the same."""
    model = make_family("DeepSeek V3", folder)
    config = json.loads((model / "config.json").read_text())
    last = config["num_hidden_layers"]
    config |= {"num_nextn_predict_layers": 1, "first_k_dense_replace": last + 1}
    (model / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(1)
    weights = load_file(model / "model.safetensors")
    before, own = f"model.layers.{last - 1}.", f"model.layers.{last}."
    weights |= {
        own + name.removeprefix(before): torch.randn(tensor.shape, generator=random) * _SCALE
        for name, tensor in list(weights.items())
        if name.startswith(before)
    }
    width = config["hidden_size"]
    weights |= {own + name: torch.ones(width) for name in ("enorm.weight", "hnorm.weight")}
    weights[own + "eh_proj.weight"] = torch.cat((torch.zeros(width, width), torch.eye(width)), dim=1)
    weights[own + "shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    weights[own + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[own + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model / "model.safetensors")
    return model, {"method": "mtp", "num_speculative_tokens": 1}
