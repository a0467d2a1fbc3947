"""The reference decoder: a language model of embedding, blocks, final norm and head, configured by a probe."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from propcheck.errors import PropcheckError
from propcheck.targets.decoder.deltanet import GatedDeltaNet
from propcheck.targets.decoder.ffn import FeedForward
from propcheck.targets.decoder.init import initialise, keep_in_fp32
from propcheck.targets.decoder.normalization import make_norm
from propcheck.targets.decoder.residual import FINAL_NORM, Sublayer, UpdateScale, add_update, equation
from propcheck.targets.decoder.softmax_attention import Attention

if TYPE_CHECKING:
    from propcheck.config.decoder import DecoderConfig


class Block(nn.Module):
    """One layer: a mixer and a feed-forward network, each adding its update to the stream.

    ``mixer_norm`` and ``ffn_norm`` are the N of the sublayers' equations (None for ``none``); ``mixer_output_norm`` and
    ``ffn_output_norm`` are the M of ``sandwich`` and ``keel``.

    Parameters
    ----------
    config : DecoderConfig
        Configuration of the whole decoder.
    layer : int
        Index of this block, from 0.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        model, residual = config.model, config.residual
        self.mixer_equation, self.mixer_alpha = equation(residual.placement, layer, model.layers, mixer=True)
        self.ffn_equation, self.ffn_alpha = equation(residual.placement, layer, model.layers, mixer=False)

        # sub-LN has a norm before each output projection (arXiv 2210.06423).
        sub_norm = partial(make_norm, config=model.norm) if residual.placement == "sub-ln" else None
        self.mixer: Attention | GatedDeltaNet
        if model.mixers[layer % len(model.mixers)] == "attention":
            self.mixer = Attention(model.width, model.attention, model.norm, sub_norm)
        else:
            self.mixer = GatedDeltaNet(model.width, model.deltanet, model.norm.eps, sub_norm)
        self.ffn = FeedForward(model.width, model.ffn, sub_norm)

        with_output_norm = ("sandwich", "keel")
        self.mixer_norm = make_norm(model.width, model.norm) if self.mixer_equation != "none" else None
        self.mixer_output_norm = make_norm(model.width, model.norm) if self.mixer_equation in with_output_norm else None
        self.ffn_norm = make_norm(model.width, model.norm) if self.ffn_equation != "none" else None
        self.ffn_output_norm = make_norm(model.width, model.norm) if self.ffn_equation in with_output_norm else None
        self.mixer_update = UpdateScale(model.width, model.layers, residual, model.dropout)
        self.ffn_update = UpdateScale(model.width, model.layers, residual, model.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add both updates to the stream ``x`` [batch, tokens, width]."""
        mixer = Sublayer(self.mixer, self.mixer_norm, self.mixer_output_norm, self.mixer_update, self.mixer_alpha)
        ffn = Sublayer(self.ffn, self.ffn_norm, self.ffn_output_norm, self.ffn_update, self.ffn_alpha)
        x = add_update(self.mixer_equation, x, mixer)  # [batch, tokens, width]
        return add_update(self.ffn_equation, x, ffn)  # [batch, tokens, width]


class Decoder(nn.Module):
    """Decoder-only language model: embedding, blocks, final norm, head.

    It is built in torch's default dtype and device and initialised by ``config.init``. Placements in ``FINAL_NORM`` have a
    final norm.

    Parameters
    ----------
    config : DecoderConfig
        Shape, residual, initialisation.

    Raises
    ------
    PropcheckError
        If ``attention.rotary`` would rotate an odd number of elements.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        model = config.model
        self.dropout = model.dropout
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        self.position_embedding = nn.Embedding(model.positions, model.width) if model.positions else None
        self.embedding_norm = make_norm(model.width, model.norm) if config.residual.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(model.layers))
        self.final_norm = make_norm(model.width, model.norm) if config.residual.placement in FINAL_NORM else None
        self.head = nn.Linear(model.width, model.vocabulary, bias=False)
        if model.tied_head:
            self.head.weight = self.embedding.weight
        keep_in_fp32(self, config.keep_fp32)
        initialise(self, config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits [batch, tokens, vocabulary] of the token after each position.

        Parameters
        ----------
        input_ids : Tensor
            Token ids, [batch, tokens], integer.

        Raises
        ------
        PropcheckError
            If there are more tokens than rows of the position embedding.
        """
        x = self.embedding(input_ids)  # [batch, tokens, width]
        if self.position_embedding is not None:
            tokens, rows = input_ids.shape[1], self.position_embedding.num_embeddings
            if tokens > rows:
                raise PropcheckError(f"the input has {tokens} tokens, more than model.positions = {rows}")
            x = x + self.position_embedding(torch.arange(tokens, device=input_ids.device))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        if self.final_norm is not None:
            x = self.final_norm(x)
        logits: Tensor = self.head(x)  # [batch, tokens, vocabulary]
        return logits
