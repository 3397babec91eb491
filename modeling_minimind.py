# Copyright 2026 The MiniMind-HF contributors. Licensed under the Apache License, Version 2.0.
"""MiniMind, a small language model, written for transformers. This file travels with every checkpoint.

Letters in the shapes: B batch, S sequence, T tokens (B * S), H hidden_size, N query heads, K key/value heads,
D head_dim, L positions in the cache, I intermediate size, E experts, k experts per token, V vocab_size.

    input_ids [B, S] -> embed_tokens -> hidden_states [B, S, H]
      for each block:  h = h + self_attn(input_layernorm(h));  h = h + mlp(post_attention_layernorm(h))    [B, S, H]
    -> norm [B, S, H] -> lm_head -> logits [B, S, V]
"""

import inspect
from functools import wraps
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.generation import GenerationMixin
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple, is_tracing
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_minimind import MiniMindConfig

# transformers 5.24 renamed `past_key_values` to `cache`, in arguments and in output fields. This file says `cache`;
# CACHE is the name that the installed version expects.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def accept_past_key_values(forward):
    """Let a forward that takes `cache` be called with the older name of the argument, on every version."""

    @wraps(forward)
    def forward_with_either_name(self, *args, **kwargs):
        past_key_values = kwargs.pop("past_key_values", None)
        if past_key_values is not None:
            if kwargs.get("cache") is not None:
                raise ValueError("cache and past_key_values are two names of one argument: pass one of them")
            kwargs["cache"] = past_key_values
        return forward(self, *args, **kwargs)

    return forward_with_either_name


class MiniMindRMSNorm(nn.Module):
    """Divide the last dimension by its root mean square, then scale it (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, scale_in_float32: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
        self.scale_in_float32 = scale_in_float32

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # In float32 up to the one cast: squares overflow in float16 and lose digits in bfloat16.
        values = hidden_states.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.scale_in_float32:
            return (self.weight.float() * values).to(hidden_states.dtype)
        return self.weight * values.to(hidden_states.dtype)

    def extra_repr(self):
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}"


def make_norm(config: MiniMindConfig, size: int) -> MiniMindRMSNorm:
    return MiniMindRMSNorm(size, config.rms_norm_eps, config.rms_norm_scale_in_float32)


class MiniMindRotaryEmbedding(nn.Module):
    """Cosines and sines by which queries and keys are turned, by position (Su et al. 2021, arXiv:2104.09864)."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings  # for "dynamic"
        inv_freq, self.attention_scaling = self.compute_frequencies()  # [D / 2]
        # Not saved: transformers computes both buffers again whenever it loads a model.
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: MiniMindConfig, device=None, **kwargs) -> tuple[torch.Tensor, float]:
        """Return the frequencies theta^(-2i / D) [D / 2], in radians per position, and the factor 1 on cos and sin."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float, device=device) / config.head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    def compute_frequencies(self, device=None) -> tuple[torch.Tensor, float]:
        compute = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        return compute(self.config, device)

    def _apply(self, function, recurse=True):
        """Compute the frequencies again whenever `.half()`, `.to(…)` or `to_empty` changes the model.

        In half precision they would spoil far positions, and leaving the meta device would fill them with garbage.
        """
        super()._apply(function, recurse)
        if not self.inv_freq.is_meta:
            inv_freq = self.compute_frequencies("cpu")[0].to(self.inv_freq.device)
            self.inv_freq, self.original_inv_freq = inv_freq, inv_freq.clone()
            self.max_seq_len_cached = self.original_max_seq_len
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float()  # [B, S, D / 2]
        angles = torch.cat((angles, angles), dim=-1)  # [B, S, D]
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Turn every pair (i, i + D/2) of the last dimension by a quarter: (a, b) becomes (-b, a)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(query, key, cos, sin):
    """Turn query [B, N, S, D] and key [B, K, S, D] by the angles of cos and sin [B, S, D]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [B, 1, S, D]
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention written out: softmax(q k^T * scaling + mask) v. Returns the output [B, S, N, D] and the weights."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)  # [B, N, L, D]
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling  # [B, N, S, L]
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    output = torch.matmul(weights, value)  # [B, N, S, D]
    return output.transpose(1, 2).contiguous(), weights


class MiniMindAttention(nn.Module):
    """Causal self-attention; groups of N / K query heads share a key/value head; `use_qk_norm` norms every head."""

    def __init__(self, config: MiniMindConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
        self.is_causal = True

        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = make_norm(config, self.head_dim) if config.use_qk_norm else nn.Identity()
        self.k_norm = make_norm(config, self.head_dim) if config.use_qk_norm else nn.Identity()

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, **kwargs):
        batch_and_sequence = hidden_states.shape[:-1]
        heads = (*batch_and_sequence, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)  # [B, N, S, D]
        key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)  # [B, K, S, D]
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)  # [B, K, S, D]

        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        if isinstance(cache, Cache) or (cache is not None and CACHE == "cache"):
            # The cache of continuous batching takes from kwargs where to read and write.
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)  # [B, K, L, D]
        elif cache is not None:
            kwargs["cache"] = cache  # kept for continuous batching before 5.24: its attention functions update it

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )  # [B, S, N, D]
        output = self.o_proj(output.reshape(*batch_and_sequence, -1).contiguous())  # [B, S, H]
        return F.dropout(output, p=self.config.dropout, training=self.training), weights


class MiniMindMLP(nn.Module):
    """The gated feed-forward of SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: MiniMindConfig, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class MiniMindTopKRouter(nn.Module):
    """Choose k experts for each token: returns the logits [T, E], the weights and the indices of the chosen [T, k]."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_experts
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        router_logits = F.linear(hidden_states, self.weight)  # [T, E]
        probabilities = F.softmax(router_logits, dim=-1, dtype=torch.float32)
        top_k_weights, top_k_index = torch.topk(probabilities, self.top_k, dim=-1)  # [T, k]
        if self.norm_topk_prob and self.top_k == 1:
            # Normalising one weight gives 1, whose gradient is zero. Straight through (arXiv:1308.3432): the value
            # is exactly 1, and the loss sends the router the gradient of the probability.
            top_k_weights = 1.0 + (top_k_weights - top_k_weights.detach())
        elif self.norm_topk_prob:
            top_k_weights = top_k_weights / top_k_weights.sum(dim=-1, keepdim=True)
        return router_logits, top_k_weights.to(router_logits.dtype), top_k_index


@use_experts_implementation
class MiniMindExperts(nn.Module):
    """The experts of one block, their weights fused into 3-D tensors so that grouped kernels can run them.

    `forward` is the eager implementation; transformers may replace it (`experts_implementation`).
    """

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.num_experts = config.num_experts
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * intermediate, hidden))  # [E, 2I, H]
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, hidden, intermediate))  # [E, H, I]
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        output = torch.zeros_like(hidden_states)  # [T, H]
        # An index of num_experts marks, in expert parallelism, a token that another device serves.
        for expert in top_k_index[top_k_index < self.num_experts].unique().tolist():
            token, rank = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            expert_output = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            expert_output = expert_output * top_k_weights[token, rank, None]
            output.index_add_(0, token, expert_output.to(output.dtype))
        return output

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *args):
        """Take the tensors of single experts too: Trainer resumes by `load_state_dict`, with what a file holds.

        What a state dict lacks (it can be one shard of several) is missing, and stays as it was.
        """
        per_expert = any(name.startswith(prefix) and name.endswith(".weight") for name in state_dict)
        if per_expert and not self.down_proj.is_meta:
            gate_up, down = self.gate_up_proj.detach().clone(), self.down_proj.detach().clone()
            for expert in range(self.num_experts):
                gate, up = gate_up[expert].chunk(2)
                for name, part in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[expert])):
                    key = f"{prefix}{expert}.{name}.weight"
                    if key in state_dict:
                        part.copy_(state_dict.pop(key))
                    else:
                        missing_keys.append(key)
            state_dict |= {f"{prefix}gate_up_proj": gate_up, f"{prefix}down_proj": down}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *args)


class MiniMindSparseMoeBlock(nn.Module):
    """A mixture of experts: a token passes through the k that the router chooses for it, and all the shared ones."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.gate = MiniMindTopKRouter(config)
        self.experts = MiniMindExperts(config)
        self.shared_experts = nn.ModuleList(
            MiniMindMLP(config, config.moe_intermediate_size) for _ in range(config.num_shared_experts)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # [T, H]
        _, top_k_weights, top_k_index = self.gate(tokens)
        output = self.experts(tokens, top_k_index, top_k_weights).reshape(hidden_states.shape)
        for shared_expert in self.shared_experts:
            output = output + shared_expert(hidden_states)
        return output


class MiniMindDecoderLayer(GradientCheckpointingLayer):
    """One block: attention, then feed-forward, each on normed input and added to the residual stream."""

    def __init__(self, config: MiniMindConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = MiniMindAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = MiniMindSparseMoeBlock(config) if config.use_moe else MiniMindMLP(config, config.intermediate_size)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention_output, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attention_output
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


# What the model card of each model says: the Auto class that loads it, and its task.
CARD_TASKS = {
    "MiniMindForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "MiniMindForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "MiniMindForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "MiniMindForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
}


class MiniMindPreTrainedModel(PreTrainedModel):
    """What all models below share: what transformers may do with them, fresh weights, saving."""

    config: MiniMindConfig
    config_class = MiniMindConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MiniMindDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Position tables and causal masks of old files; this model computes its own.
    _keys_to_ignore_on_load_unexpected = [r"(^|\.)(freqs_cos|freqs_sin|pos_cis)$", r"(^|attention\.|attn\.)mask$"]
    # Outputs that hooks collect on request (`output_hidden_states=True`, …), so that no forward has to pass them on:
    # `@capture_outputs` adds them to what the trunk returns.
    _can_record_outputs = {
        "router_logits": OutputRecorder(MiniMindTopKRouter, index=0),  # the first of what the router returns
        "hidden_states": MiniMindDecoderLayer,
        "attentions": MiniMindAttention,
    }

    def __init__(self, config: MiniMindConfig, *args, **kwargs):
        config.validate_minimind()
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, (MiniMindExperts, MiniMindTopKRouter)):
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh):
        """As in transformers, but refuses tensor parallelism that would cut a key/value head in two."""
        heads = model.config.num_key_value_heads
        # An empty plan, or that of the experts alone, leaves attention whole.
        cuts = any("k_proj" in name for name in model.tp_plan) and getattr(distributed_config, "tp_plan", {}) != {}
        if cuts and heads % distributed_config.tp_size:
            raise ValueError(
                f"tensor parallelism over {distributed_config.tp_size} processes would cut this model's {heads} "
                f"key/value heads: use a number of processes that divides num_key_value_heads={heads}"
            )
        return super().maybe_distribute_model(model, distributed_config, mesh)

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers, and a model card where the folder has none.

        Raises:
            ValueError: the folder holds the source of this file, which would be copied onto itself.
        """
        folder = Path(save_directory)
        if folder.resolve() == Path(__file__).parent.resolve():
            raise ValueError(f"{folder} holds the source code of MiniMind: save the model to another folder")
        super().save_pretrained(save_directory, **kwargs)
        card = folder / "README.md"
        if kwargs.get("is_main_process", True) and not card.exists():
            card.write_text(self._model_card(), encoding="utf-8")

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        """Every push ends here; where the repository has no card, transformers has just written a placeholder."""
        card = Path(working_dir) / "README.md"
        if card.exists() and "automatically generated" in card.read_text(encoding="utf-8"):
            tags = ModelCard.load(card).data.tags or []  # those that the caller gave
            card.write_text(self._model_card(tags), encoding="utf-8")
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def _model_card(self, tags=()) -> str:
        config = self.config
        experts = f", {config.num_experts} experts, {config.num_experts_per_tok} per token" if config.use_moe else ""
        tags = dict.fromkeys(["minimind", *(self.model_tags or []), *tags])  # each once, in this order
        tag_lines = "\n".join(f"- {tag}" for tag in tags)
        auto_class, task = CARD_TASKS.get(type(self).__name__, ("AutoModel", "feature-extraction"))
        return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: {task}
tags:
{tag_lines}
---

# {"MiniMind, mixture of experts" if config.use_moe else "MiniMind"}

A [MiniMind](https://github.com/jingyaogong/minimind) model for {task}: {self.num_parameters():,} parameters,
{config.num_hidden_layers} blocks, hidden size {config.hidden_size}, {config.num_attention_heads} query heads,
{config.num_key_value_heads} key/value heads, vocabulary {config.vocab_size}{experts}.

```python
from transformers import AutoTokenizer, {auto_class}

name = "PATH_OR_REPOSITORY"
model = {auto_class}.from_pretrained(name, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
```

`transformers.pipeline("{task}", name, trust_remote_code=True)` does both. `trust_remote_code=True` runs the two Python
files of this repository. With the package `minimind-hf` installed, `import minimind_hf` takes their place.
"""


def refuse_bad_lengths(config: MiniMindConfig, hidden_states, attention_mask, position_ids, cache):
    """Raise for a mask [B, L] of another shape, and for positions that the model is not made for.

    This never makes the host wait for an accelerator, unless the input is longer than the positions reach.
    """
    batch, length = hidden_states.shape[:2]
    grows = cache is None or isinstance(cache, DynamicCache)  # others have room for more, which a mask may cover
    if grows and cache is not None:
        length += cache.get_seq_length()
    if attention_mask is not None and attention_mask.dim() == 2:
        if attention_mask.shape[0] != batch or (grows and attention_mask.shape[1] != length):
            raise ValueError(
                f"attention_mask is {list(attention_mask.shape)}, but the batch and the length of the input, with "
                f"what is cached, are {[batch, length]}"
            )
        length = attention_mask.shape[1]

    rope, limit = config.rope_parameters, config.max_position_embeddings
    if rope["rope_type"] == "dynamic":  # reaches as far as it is asked to
        return
    if rope["rope_type"] == "linear":
        limit = int(limit * rope["factor"])
    if position_ids.device.type == "cpu" or (length > limit and not position_ids.is_meta):
        last = position_ids.max().item()
        if last >= limit:
            raise ValueError(
                f"position {last} is too far: max_position_embeddings={config.max_position_embeddings} and rope_type="
                f"{rope['rope_type']!r} reach to {limit - 1}. Shorten the input, or change them when loading the model"
            )


class MiniMindModel(MiniMindPreTrainedModel):
    """The trunk: embedding, blocks, final norm."""

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MiniMindDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config, config.hidden_size)
        self.rotary_emb = MiniMindRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @accept_past_key_values
    @merge_with_config_defaults  # use_cache
    @capture_outputs  # see _can_record_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """Run the trunk.

        Args:
            input_ids: token ids [B, S].
            attention_mask: 1 for tokens and 0 for padding [B, L], or a ready mask [B, 1, S, L]: of float, to be added
                to the scores; of bool or int, true where a position may be seen.
            position_ids: position of each token [B, S]; by default they go on from the cache.
            cache: keys and values of earlier tokens, updated in place; also accepted as `past_key_values`.
            inputs_embeds: [B, S, H], instead of input_ids.
            use_cache: make a cache where none is given, and return it.

        Returns:
            `last_hidden_state` [B, S, H], and the cache.

        Raises:
            ValueError: both or neither of input_ids and inputs_embeds; a cache under gradient checkpointing; a mask of
                another shape; positions beyond `max_position_embeddings` (not checked in a compiled graph); router
                logits asked for under reentrant gradient checkpointing.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        hidden_states = F.dropout(inputs_embeds, p=self.config.dropout, training=self.training)  # [B, S, H]

        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if cache is not None:
                raise ValueError("gradient checkpointing runs every block twice: it cannot update a cache, pass none")
        elif use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            first = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0) + first

        if not is_tracing(hidden_states):
            refuse_bad_lengths(self.config, hidden_states, attention_mask, position_ids, cache)
        if attention_mask is not None and attention_mask.dim() == 4 and not attention_mask.is_floating_point():
            # Attention functions add a ready mask to the scores; zeros and ones would be added as they are.
            allowed, lowest = attention_mask.bool(), torch.finfo(hidden_states.dtype).min
            attention_mask = torch.zeros_like(allowed, dtype=hidden_states.dtype).masked_fill(~allowed, lowest)
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: cache},
        )
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=causal_mask,
                position_ids=position_ids,
                cache=cache,
                **kwargs,
            )
        reentrant = (
            self.gradient_checkpointing and type(hidden_states.grad_fn).__name__ == "CheckpointFunctionBackward"
        )
        if reentrant and kwargs.get("output_router_logits"):
            raise ValueError(
                "reentrant gradient checkpointing hides the router's logits, so a balance loss would train nothing: "
                "pass gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE: cache})


def load_balancing_loss(
    router_logits, top_k: int, attention_mask: torch.Tensor, per_sequence: bool = False
) -> torch.Tensor:
    """How unevenly tokens are spread over the experts; an even spread gives `top_k` for each block.

    For one block: E * sum over experts of (choices of this expert per token) * (its mean probability), as in Switch
    Transformers (arXiv:2101.03961), equation 4; the blocks are summed. Padding does not count.

    Args:
        router_logits: one tensor [T, E] for each block.
        top_k: experts per token.
        attention_mask: 1 for tokens and 0 for padding [B, S].
        per_sequence: the mean of the losses of the sequences, as in DeepSeek-V2 (arXiv:2405.04434), not of the batch.
    """
    groups = attention_mask if per_sequence else attention_mask.reshape(1, -1)  # [G, T / G]
    total = torch.zeros((), device=router_logits[0].device)
    for logits in router_logits:
        probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)  # [T, E]
        chosen = probabilities.topk(top_k, dim=-1).indices  # [T, k]
        choices = F.one_hot(chosen, logits.shape[-1]).sum(dim=1).float()  # [T, E]
        weight = groups.to(probabilities) / groups.sum(dim=1, keepdim=True).clamp(min=1)  # [G, T / G]
        load = torch.einsum("gt,gte->ge", weight, choices.view(*groups.shape, -1))  # [G, E]
        probability = torch.einsum("gt,gte->ge", weight, probabilities.view(*groups.shape, -1))
        total = total + logits.shape[-1] * (load * probability).sum(dim=-1).mean().to(total.device)
    return total


class MiniMindForCausalLM(MiniMindPreTrainedModel, GenerationMixin):
    """The trunk and the language-model head that turns hidden states into logits over the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.model = MiniMindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @accept_past_key_values
    @can_return_tuple  # return_dict=False
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Predict the next token at every position. Arguments not listed here are those of `MiniMindModel`.

        Args:
            labels: token ids [B, S], -100 where no loss is wanted; shifted here, so pass them as they stand, and keep
                all the logits.
            output_router_logits: return the router logits of every block, and the balance loss.
            logits_to_keep: compute the logits of the last so many positions only (0: all), of these positions [P], of
                these positions of each row [B, P], or of those that a boolean mask [B, S] selects.

        Returns:
            `logits` [B, S, V], or of the positions kept; `loss`, the mean cross entropy over the labels; `aux_loss`,
            the balance loss of a mixture of experts, not yet weighted, in training or where router logits are asked
            for (in training `loss` includes it, times `router_aux_loss_coef`); the cache, and what else was asked for.
        """
        if output_router_logits is None:
            output_router_logits = getattr(self.config, "output_router_logits", False)
        balances_experts = self.config.use_moe and self.config.router_aux_loss_coef > 0 and self.training
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=self.config.use_moe and (output_router_logits or balances_experts),
            **kwargs,
        )
        logits = self.lm_head(
            keep_positions(outputs.last_hidden_state, logits_to_keep)
        )  # [B, S, V], or fewer positions

        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if outputs.router_logits is not None:
            aux_loss = self._balance_loss(outputs.router_logits, attention_mask, outputs.last_hidden_state.shape[:2])
            if loss is not None and balances_experts:
                weight = self.config.router_aux_loss_coef * share_of_batch(labels, kwargs.get("num_items_in_batch"))
                loss = loss + weight * aux_loss.to(loss.device)

        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits if output_router_logits else None,
            **{CACHE: getattr(outputs, CACHE)},
        )

    def _balance_loss(self, router_logits, attention_mask, batch_and_sequence):
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask[:, -batch_and_sequence[1] :]  # [B, S] of [B, L]: no cached token is routed
        else:  # a ready mask [B, 1, S, L] does not say which tokens are padding
            attention_mask = torch.ones(batch_and_sequence, device=router_logits[0].device)
        top_k, per_sequence = self.config.num_experts_per_tok, self.config.seq_aux
        return load_balancing_loss(router_logits, top_k, attention_mask, per_sequence)


def keep_positions(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Select the positions of hidden_states [B, S, H] whose logits are wanted; see `MiniMindForCausalLM.forward`."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]  # all of them for 0, since -0 is 0
    if logits_to_keep.dim() == 1:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]  # [P, H]
    return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)


def share_of_batch(labels, num_items_in_batch):
    """This micro-batch's share of the labels of the whole batch, so that accumulation does not multiply the loss."""
    if num_items_in_batch is None:
        return 1.0
    return (labels[..., 1:] != -100).sum() / num_items_in_batch


class MiniMindForSequenceClassification(GenericForSequenceClassification, MiniMindPreTrainedModel):
    """The trunk and a linear layer on the last token that is not padding; one row of scores for each sequence."""

    # Here and below: a mixture of experts is trained without its balance loss, as by the heads of stock classes.
    # And the generic __init__ would ask AutoModel for the trunk, which remote code may not do.
    def __init__(self, config: MiniMindConfig):
        MiniMindPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = MiniMindModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class MiniMindForTokenClassification(GenericForTokenClassification, MiniMindPreTrainedModel):
    """The trunk and a linear layer on every token."""

    def __init__(self, config: MiniMindConfig):
        MiniMindPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = MiniMindModel(config)
        self.dropout = nn.Dropout(config.dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class MiniMindForQuestionAnswering(GenericForQuestionAnswering, MiniMindPreTrainedModel):
    """The trunk and two scores for every token: that the answer starts there, and that it ends there."""

    def __init__(self, config: MiniMindConfig):
        MiniMindPreTrainedModel.__init__(self, config)
        self.model = MiniMindModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


# Trainer shifts the labels that it smooths for the classes named here, and no others.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(MiniMindConfig.model_type, "MiniMindForCausalLM")

# On disk every expert has tensors of its own, as in the reference implementation; in memory they are fused. The
# mapping lives here since remote code loads nothing else, and is guarded since the file can be loaded twice.
if get_checkpoint_conversion_mapping(MiniMindConfig.model_type) is None:
    register_checkpoint_conversion_mapping(
        MiniMindConfig.model_type,
        [
            WeightConverter(
                source_patterns=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
                target_patterns="mlp.experts.gate_up_proj",
                operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(
                source_patterns="mlp.experts.*.down_proj.weight",
                target_patterns="mlp.experts.down_proj",
                operations=[MergeModulelist(dim=0)],
            ),
        ],
    )
