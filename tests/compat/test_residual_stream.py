"""Hooks on a decoder's layers see the residual stream, whatever its fused norms write into their inputs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.compat.residual_stream import observe_residual_stream


class Attention(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor, forward_batch: object = None) -> torch.Tensor:
        return hidden_states * 0.5


class Layer(torch.nn.Module):
    """As SGLang's decoder layers: the residual is added by the next norm, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden_states.clone() if residual is None else residual.add_(hidden_states)
        hidden_states.copy_(residual).mul_(2)
        return self.self_attn(hidden_states=hidden_states), residual


class BoundaryLayer(Layer):
    """As in releases that keep the stream in the batch: the boundary adds what the stage before produced, in place."""

    attn_boundary = object()

    def forward(self, hidden_states: torch.Tensor, forward_batch: SimpleNamespace) -> torch.Tensor:
        stream = forward_batch.residual_stream
        stream.residual = hidden_states.clone() if stream.residual is None else stream.residual.add_(hidden_states)
        return self.self_attn(hidden_states=stream.residual * 2, forward_batch=forward_batch)


def decoder_of(layer: type[Layer]) -> torch.nn.Module:
    decoder = torch.nn.Module()
    decoder.model = torch.nn.Module()
    decoder.model.layers = torch.nn.ModuleList([layer(), layer()])
    return decoder


@pytest.mark.parametrize("of", [Layer, BoundaryLayer], ids=["fused norms", "kept in the batch"])
def test_x_and_y_are_the_stream_before_and_behind_attention(of: type[Layer]) -> None:
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    decoder = decoder_of(of)
    observe_residual_stream(decoder, lambda layer, x, y: seen.append((layer, x, y)))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    hidden, residual, batch = x.clone(), None, SimpleNamespace(residual_stream=SimpleNamespace(residual=None))
    for layer in decoder.model.layers:
        if of is Layer:
            hidden, residual = layer(torch.arange(len(x)), hidden, residual=residual)
        else:
            hidden = layer(hidden, batch)
    assert [layer for layer, *_ in seen] == [0, 1]
    for (_, x_seen, y_seen), (x_expected, y_expected) in zip(seen, [(x, 2 * x), (2 * x, 4 * x)], strict=True):
        torch.testing.assert_close(x_seen, x_expected)
        torch.testing.assert_close(y_seen, y_expected)


@pytest.mark.parametrize("name", ["residual_multiplier", "post_self_attn_layernorm", "pre_feedforward_layernorm"])
def test_layers_that_change_the_output_before_adding_it_are_refused(name: str) -> None:
    decoder = decoder_of(Layer)
    setattr(decoder.model.layers[1], name, torch.nn.Identity())
    with pytest.raises(RuntimeError, match=r"as it is, got Module; calibration does not support"):
        observe_residual_stream(decoder, lambda *_: None)


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None])
def test_another_structure_is_refused_by_name(model: object) -> None:
    with pytest.raises(RuntimeError, match=r"expected a decoder whose layers have self_attn.* not support"):
        observe_residual_stream(model, lambda *_: None)
