"""The reference decoder: one readable language model that the probe files configure."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from propcheck.errors import PropcheckError
from propcheck.targets.decoder.deltanet import GatedDeltaNet
from propcheck.targets.decoder.ffn import FeedForward
from propcheck.targets.decoder.init import hold_in_fp32, initialise
from propcheck.targets.decoder.normalization import make_norm
from propcheck.targets.decoder.residual import FINAL_NORM, Update, add_update, equation
from propcheck.targets.decoder.softmax_attention import Attention

if TYPE_CHECKING:
    from propcheck.config.decoder import DecoderConfig


class Block(nn.Module):
    """One layer: a mixer and a feed-forward network, each added to the stream.

    ``mixer_norm`` and ``ffn_norm`` are the N of the sublayer's equation (None for ``none``), ``mixer_output_norm`` and
    ``ffn_output_norm`` the M of ``sandwich`` and ``keel``.

    Parameters
    ----------
    config : DecoderConfig
        The whole decoder's.
    layer : int
        Index of this block, from 0.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        model, residual = config.model, config.residual
        self.mixer_equation, self.mixer_alpha = equation(residual.placement, layer, model.layers, mixer=True)
        self.ffn_equation, self.ffn_alpha = equation(residual.placement, layer, model.layers, mixer=False)

        # A norm before each output projection (sub-LN, arXiv 2210.06423).
        sub_norm = partial(make_norm, config=model.norm) if residual.placement == "sub-ln" else None
        self.mixer: Attention | GatedDeltaNet
        if model.mixers[layer % len(model.mixers)] == "attention":
            self.mixer = Attention(model.width, model.attention, model.norm, sub_norm)
        else:
            self.mixer = GatedDeltaNet(model.width, model.deltanet, model.norm.eps, sub_norm)
        self.ffn = FeedForward(model.width, model.ffn, sub_norm)

        second = ("sandwich", "keel")
        self.mixer_norm = make_norm(model.width, model.norm) if self.mixer_equation != "none" else None
        self.mixer_output_norm = make_norm(model.width, model.norm) if self.mixer_equation in second else None
        self.ffn_norm = make_norm(model.width, model.norm) if self.ffn_equation != "none" else None
        self.ffn_output_norm = make_norm(model.width, model.norm) if self.ffn_equation in second else None
        self.mixer_update = Update(model.width, model.layers, residual, model.dropout)
        self.ffn_update = Update(model.width, model.layers, residual, model.dropout)

    def forward(self, stream: Tensor) -> Tensor:
        """Add both updates to ``stream`` [batch, tokens, width]."""
        stream = add_update(
            self.mixer_equation,
            stream,
            self.mixer,
            norm=self.mixer_norm,
            output_norm=self.mixer_output_norm,
            update=self.mixer_update,
            alpha=self.mixer_alpha,
        )
        return add_update(
            self.ffn_equation,
            stream,
            self.ffn,
            norm=self.ffn_norm,
            output_norm=self.ffn_output_norm,
            update=self.ffn_update,
            alpha=self.ffn_alpha,
        )


class Decoder(nn.Module):
    """Decoder-only language model: embedding, blocks, final norm, head.

    Built in torch's current default dtype and device, initialised as ``config.init`` says. The final norm exists for
    the placements of ``FINAL_NORM``; post, deepnorm and keel end in a norm already, none has no norm at all.

    Parameters
    ----------
    config : DecoderConfig
        Shape, residual, initialisation.

    Raises
    ------
    PropcheckError
        If the configuration asks for what cannot be computed.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        model = config.model
        if {"weight", "bias"} & set(config.keep_fp32):
            raise PropcheckError(
                "keep_fp32 = weight or bias: matrix products need one dtype; name parameters such as A_log or dt_bias"
            )
        self.dropout = model.dropout
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        self.position_embedding = nn.Embedding(model.positions, model.width) if model.positions else None
        self.embedding_norm = make_norm(model.width, model.norm) if config.residual.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(model.layers))
        self.final_norm = make_norm(model.width, model.norm) if config.residual.placement in FINAL_NORM else None
        self.head = nn.Linear(model.width, model.vocabulary, bias=False)
        if model.tied_head:
            self.head.weight = self.embedding.weight
        hold_in_fp32(self, config.keep_fp32)
        initialise(self, config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Give the logits [batch, tokens, vocabulary] of the token that follows each position.

        Parameters
        ----------
        input_ids : Tensor
            Token ids, [batch, tokens], integer.

        Raises
        ------
        PropcheckError
            If there are more tokens than rows of the position embedding.
        """
        stream = self.embedding(input_ids)  # [batch, tokens, width]
        if self.position_embedding is not None:
            tokens, rows = input_ids.shape[1], self.position_embedding.num_embeddings
            if tokens > rows:
                raise PropcheckError(f"model.positions = {rows} is less than the {tokens} tokens of the input")
            stream = stream + self.position_embedding(torch.arange(tokens, device=input_ids.device))
        if self.embedding_norm is not None:
            stream = self.embedding_norm(stream)
        if self.dropout:
            stream = F.dropout(stream, self.dropout, self.training)
        for block in self.blocks:
            stream = block(stream)
        if self.final_norm is not None:
            stream = self.final_norm(stream)
        logits: Tensor = self.head(stream)  # [batch, tokens, vocabulary]
        return logits
