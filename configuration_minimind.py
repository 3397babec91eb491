# Copyright 2026 The MiniMind-HF contributors. Licensed under the Apache License, Version 2.0.
"""The configuration of a MiniMind model. This file travels with every checkpoint, beside modeling_minimind.py."""

import math
from dataclasses import fields
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, Qwen3MoeConfig
from transformers.activations import ACT2FN

# Every Auto class finds its model from a saved folder, whichever head was saved.
AUTO_MAP = {
    "AutoConfig": "configuration_minimind.MiniMindConfig",
    "AutoModel": "modeling_minimind.MiniMindModel",
    "AutoModelForCausalLM": "modeling_minimind.MiniMindForCausalLM",
    "AutoModelForSequenceClassification": "modeling_minimind.MiniMindForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_minimind.MiniMindForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_minimind.MiniMindForQuestionAnswering",
}

# What `inference_rope_scaling` stands for in the reference implementation: yarn from 2048 to 32768 positions.
YARN_PARAMETERS = {
    "rope_type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.0,
}

# The keys of rope_parameters beside rope_type and rope_theta, for each rope_type.
ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {*YARN_PARAMETERS, "mscale", "mscale_all_dim", "truncate"},
}

# Keys that transformers or other decoder configs know, for what MiniMind does not have: only the value that switches
# it off is accepted.
NEUTRAL_VALUES = {
    "attention_bias": False,
    "attention_chunk_size": None,
    "attribute_map": {},
    "attn_logit_softcapping": None,
    "custom_pipelines": {},
    "decoder": None,
    "final_logit_softcapping": None,
    "is_causal": True,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "qkv_bias": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "sliding_window": None,
    "text_config": None,
    "transformers_weights": None,
    "use_sliding_window": False,
}

# MiniMind2's own spelling of keys, and the values that its configs take for granted. See `from_minimind2`.
MINIMIND2_KEYS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
MINIMIND2_DEFAULTS = {
    "hidden_size": 512,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "use_qk_norm": False,
    "rms_norm_scale_in_float32": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "seq_aux": True,
}

# Keys that only the configs of an early MiniMind2 and of MiniMind v1 hold.
EARLY_KEYS = ("dim", "n_layers")


@strict
class MiniMindConfig(PreTrainedConfig):
    """Every size and switch of a MiniMind model.

    The defaults are those of the published MiniMind-3 (64M parameters). Keys that are not listed here are kept and
    written back by `save_pretrained`. A mixture of experts also has `output_router_logits` (return the router logits
    of every block; default False), a dense model has no such attribute. The old spelling `rope_theta` + `rope_scaling`
    is understood as well, and `from_pretrained` and `from_dict` understand the published configs of MiniMind2.

    Raises:
        ValueError: a value is impossible, contradicts another one, or asks for a feature that MiniMind lacks.
        StrictDataclassFieldValidationError: a value has the wrong type.

    Example:

    ```python
    >>> from minimind_hf import MiniMindConfig
    >>> MiniMindConfig(hidden_size=512).head_dim
    64

    ```
    """

    model_type = "minimind"
    # What Trainer keeps out of its predictions. The second is the name of the first before transformers 5.24.
    keys_to_ignore_at_inference = ["cache", "past_key_values", "aux_loss", "router_logits"]
    default_theta = 1_000_000.0  # base of the rotary frequencies when the config names none

    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.shared_experts.*.gate_proj": "colwise",
        "layers.*.mlp.shared_experts.*.up_proj": "colwise",
        "layers.*.mlp.shared_experts.*.down_proj": "rowwise",
    }
    # The names of these styles change between versions; the experts are named as in Qwen3-MoE.
    base_model_ep_plan: ClassVar[dict[str, str]] = Qwen3MoeConfig.base_model_ep_plan
    base_model_pp_plan: ClassVar[dict[str, tuple[list[str], list[str]]]] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 6400  # rows of the embedding table
    hidden_size: int = 768  # width of the residual stream
    intermediate_size: int | None = None  # width inside the feed-forward; default ceil(hidden_size * pi / 64) * 64
    num_hidden_layers: int = 8  # number of blocks
    num_attention_heads: int = 8  # query heads
    num_key_value_heads: int | None = 4  # key/value heads, each shared by several query heads; None: as many
    head_dim: int | None = None  # size of one head; default hidden_size // num_attention_heads
    hidden_act: str = "silu"  # activation of the gated feed-forward
    max_position_embeddings: int = 32768  # longest sequence, in tokens
    initializer_range: float = 0.02  # standard deviation of fresh weights
    rms_norm_eps: float = 1e-6  # added to the mean square inside every RMSNorm
    rms_norm_scale_in_float32: bool = True  # cast after the norm's weight is applied; MiniMind2 casts before
    use_qk_norm: bool = True  # norm every head's query and key; MiniMind2 does not
    use_cache: bool = True  # return keys and values, so that the next token needs no second pass over the prompt
    tie_word_embeddings: bool = True  # lm_head shares the weight of embed_tokens
    rope_parameters: dict[str, Any] | None = None  # rotary embedding: rope_type, rope_theta and what the type needs
    inference_rope_scaling: bool | None = None  # MiniMind's yarn for long inputs; None: as rope_parameters say
    dropout: float | int = 0.0  # probability, in training: embeddings, attention weights and output, token classifier
    attention_dropout: float | int | None = None  # probability for the attention weights alone; None: dropout
    flash_attn: bool = True  # False: the plain eager attention, unless attn_implementation says otherwise
    use_moe: bool = False  # a mixture of experts instead of one feed-forward per block
    num_experts: int = 4  # experts per block
    num_experts_per_tok: int = 1  # experts that each token is sent to (top-k)
    moe_intermediate_size: int | None = None  # width inside one expert; default intermediate_size
    norm_topk_prob: bool = True  # scale the weights of the chosen experts to sum to one
    num_shared_experts: int = 0  # experts that every token passes through besides; MiniMind2 has one
    router_aux_loss_coef: float | int = 5e-4  # weight of the load-balancing loss; 0 switches it off
    seq_aux: bool = False  # balance the experts within each sequence, not over the batch; MiniMind2 does
    bos_token_id: int | None = 1  # <|im_start|>
    eos_token_id: int | list[int] | None = 2  # <|im_end|>
    pad_token_id: int | None = 0  # <|endoftext|>

    def __post_init__(self, **kwargs):
        refuse_older_spelling(kwargs)
        refuse_unsupported_features(kwargs)
        output_router_logits = kwargs.pop("output_router_logits", False)
        if not isinstance(output_router_logits, bool):
            raise ValueError(f"output_router_logits={output_router_logits!r}: it must be true or false")
        self.output_router_logits = output_router_logits
        self._refuse_bad_sizes()

        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = math.ceil(self.hidden_size * math.pi / 64) * 64
        if self.moe_intermediate_size is None:
            self.moe_intermediate_size = self.intermediate_size
        self._refuse_bad_combinations()

        self._resolve_rope(kwargs)
        if not self.flash_attn:
            kwargs.setdefault("attn_implementation", "eager")
        super().__post_init__(**kwargs)

    @property
    def output_router_logits(self) -> bool:
        """Whether to return the router logits of every block.

        A dense config never has this attribute, even where one sets it: trainers take any config that has it for a
        mixture of experts, and TRL's SFT trainer sets it on all of them.
        """
        if not self.use_moe:
            raise AttributeError("output_router_logits: a dense model has no router")
        return self.__dict__.get("output_router_logits", False)

    @output_router_logits.setter
    def output_router_logits(self, value: bool):
        if self.use_moe:
            self.__dict__["output_router_logits"] = value

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers, but values given while loading are resolved and checked like those of the file.

        A config of MiniMind2 is translated.
        """
        known = {field.name for field in fields(cls)} | {"rope_theta", "rope_scaling", "output_router_logits"}
        given = {name: kwargs.pop(name) for name in known & kwargs.keys() - {"dtype"}}
        if "n_routed_experts" in config_dict and not is_early_config(config_dict):
            config_dict = from_minimind2(config_dict, top_k=given.get("num_experts_per_tok"))
        return super().from_dict({**config_dict, **given}, **kwargs)

    def validate_minimind(self):
        """Check everything once more, since attributes may have changed: every model does it when it is made.

        `@strict` runs each method named `validate_…`: after construction, and when `save_pretrained` asks for it.
        """
        self._refuse_bad_sizes()
        self._refuse_bad_combinations()
        refuse_bad_rope(self.rope_parameters)
        if "rope_theta" in self.__dict__:
            raise ValueError("rope_theta was set on the config: set config.rope_parameters['rope_theta'] instead")
        yarn = self.rope_parameters["rope_type"] == "yarn"
        if yarn != self.inference_rope_scaling and (yarn or self._has_far_positions()):
            raise ValueError(
                f"inference_rope_scaling={self.inference_rope_scaling} was set on the config, but its rope_parameters "
                f"are {self.rope_parameters}: make a new config instead"
            )

    def _has_far_positions(self) -> bool:
        """Whether there are positions for yarn to bring closer; the reference leaves the frequencies alone if not."""
        return self.max_position_embeddings > YARN_PARAMETERS["original_max_position_embeddings"]

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers. The code is saved beside the config, so its `auto_map` points at this folder."""
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, **kwargs)

    def _refuse_bad_sizes(self):
        positive = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        positive += ("num_experts", "num_experts_per_tok", "rms_norm_eps")
        optional = ("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size")
        for name in positive + tuple(name for name in optional if getattr(self, name) is not None):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: it must be positive and finite")
        if self.rms_norm_eps >= 1:
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps}: it must be below 1, or it drowns what it is added to")
        for name in ("initializer_range", "num_shared_experts", "router_aux_loss_coef"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: it must be zero or positive, and finite")
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name}={value}: a probability of dropping must be at least 0 and below 1")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is unknown; transformers has {sorted(ACT2FN)}")

    def _refuse_bad_combinations(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}: every key/value head serves as many query heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} (by default hidden_size // num_attention_heads = {self.hidden_size} // "
                f"{self.num_attention_heads}) must be a positive even number: rotary embeddings turn pairs of values"
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name}={value} is outside the vocabulary of vocab_size={self.vocab_size}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is above num_experts={self.num_experts}: "
                "a token cannot be sent to more experts than there are"
            )

    def _resolve_rope(self, kwargs):
        """Bring every spelling to `rope_parameters`; `inference_rope_scaling` says afterwards whether yarn is on."""
        old_spelling, theta = kwargs.pop("rope_scaling", None), kwargs.pop("rope_theta", None)
        if not isinstance(old_spelling, dict | None):
            raise ValueError(f"rope_scaling={old_spelling!r}: it must be a dict")
        if old_spelling and self.rope_parameters and old_spelling != self.rope_parameters:
            raise ValueError(
                f"rope_scaling={old_spelling} and rope_parameters={self.rope_parameters} differ: give one of them"
            )
        rope = dict(old_spelling or self.rope_parameters or {})
        old_type = rope.pop("type", None) or rope.get("rope_type", "default")
        rope_type = rope.setdefault("rope_type", old_type)
        if old_type != rope_type:
            raise ValueError(f"type={old_type!r} contradicts rope_type={rope_type!r} in the rope parameters")
        if theta is None:
            theta = rope.get("rope_theta", self.default_theta)
        if rope.setdefault("rope_theta", theta) != theta:
            raise ValueError(f"rope_theta={theta} contradicts rope_theta={rope['rope_theta']} in rope_parameters")
        kwargs.pop("partial_rotary_factor", None)  # 1.0, or refused before
        if rope.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor other than 1.0: MiniMind turns the whole head")
        refuse_bad_rope(rope)

        if self.inference_rope_scaling is None:
            self.inference_rope_scaling = rope_type == "yarn"
        elif self.inference_rope_scaling and rope_type == "default":
            if self._has_far_positions():
                rope.update(YARN_PARAMETERS)
        elif self.inference_rope_scaling != (rope_type == "yarn"):
            raise ValueError(
                f"inference_rope_scaling={self.inference_rope_scaling} contradicts rope_type={rope_type!r}: to switch "
                "yarn off, pass rope_parameters={'rope_type': 'default'} too; to switch it on, pass no other rope type"
            )
        self.rope_parameters = rope


def refuse_bad_rope(rope):
    """Raise for rope parameters that are unknown, or that give no frequencies."""
    rope_type, theta = rope["rope_type"], rope["rope_theta"]
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        raise ValueError(f"rope_type={rope_type!r} is not one of {', '.join(ROPE_KEYS)}")
    unknown = sorted(rope.keys() - ROPE_KEYS[rope_type] - {"rope_type", "rope_theta"})
    if unknown:
        raise ValueError(f"rope_parameters hold {', '.join(unknown)}, which rope_type={rope_type!r} does not have")
    if not is_number(theta) or not 1 < theta <= 1e15:
        raise ValueError(f"rope_theta={theta!r}: it must be a number above 1, and 1e15 at most")
    if not isinstance(rope.get("truncate", True), bool):
        raise ValueError(f"truncate={rope['truncate']!r} in the rope parameters: it must be true or false")
    required = {"factor"} & ROPE_KEYS[rope_type]
    for name in required | (rope.keys() - {"rope_type", "rope_theta", "truncate"}):
        lowest = 1 if name == "factor" else 1e-6
        if not is_number(rope.get(name)) or not lowest <= rope[name] <= 1e9:
            raise ValueError(f"rope_type={rope_type!r} needs a {name} from {lowest} to 1e9, got {rope.get(name)!r}")


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def from_minimind2(values: dict, top_k: int | None = None) -> dict:
    """Translate a MiniMind2 config to the keys of `MiniMindConfig`, and complete it with that generation's defaults.

    Args:
        values: MiniMind2's config; keys may be renamed already.
        top_k: experts per token, where it is not what `values` say.

    Raises:
        ValueError: two spellings of one key contradict each other.
    """
    renamed = {key: value for key, value in values.items() if key not in (*MINIMIND2_KEYS, "aux_loss_alpha")}
    for old, new in MINIMIND2_KEYS.items():
        if old in values and renamed.setdefault(new, values[old]) != values[old]:
            raise ValueError(f"{old}={values[old]} contradicts {new}={renamed[new]} in one config")
    config = {**MINIMIND2_DEFAULTS, **renamed}
    if config["num_shared_experts"] is None:
        config["num_shared_experts"] = 0
    if config.get("intermediate_size") is None and isinstance(config["hidden_size"], int):
        config["intermediate_size"] = math.ceil(int(8 * config["hidden_size"] / 3) / 64) * 64
    config.setdefault("moe_intermediate_size", config.get("intermediate_size"))

    top_k = config["num_experts_per_tok"] if top_k is None else top_k
    if top_k == 1:  # MiniMind2 normalises the weights of several experts, but not that of a single one
        config["norm_topk_prob"] = False
    alpha = values.get("aux_loss_alpha", 0.01)
    if is_number(alpha) and is_number(top_k) and top_k > 0:
        alpha = alpha / top_k  # MiniMind2 averages the load over the k choices of a token, MiniMind-3 adds them up
    if "aux_loss_alpha" in values or "router_aux_loss_coef" not in config:
        config["router_aux_loss_coef"] = alpha
    return config


def is_early_config(values: dict) -> bool:
    return any(key in values for key in EARLY_KEYS)


def refuse_older_spelling(keys):
    """Raise for keys of older generations, which would be ignored here."""
    if is_early_config(keys):
        raise ValueError(
            f"{' or '.join(EARLY_KEYS)} in the config: this is an early MiniMind2 or MiniMind v1, whose tensors have "
            "other names and another order. `minimind convert to-hf` makes a folder of it that loads"
        )
    minimind2 = [key for key in (*MINIMIND2_KEYS, "aux_loss_alpha") if key in keys]
    if minimind2:
        raise ValueError(
            f"{minimind2[0]!r} is MiniMind2's spelling: MiniMindConfig.from_dict translates a whole config of "
            "MiniMind2 (one with n_routed_experts)"
        )


def refuse_unsupported_features(keys):
    """Raise where a key asks for something that MiniMind does not have, or would damage the config itself."""
    for key, neutral in NEUTRAL_VALUES.items():
        if key in keys and (keys[key] != neutral or isinstance(keys[key], bool) != isinstance(neutral, bool)):
            raise ValueError(f"{key}={keys[key]!r}: MiniMind supports only {key}={neutral!r}")
    for key in keys:
        if callable(getattr(MiniMindConfig, key, None)):
            raise ValueError(f"the key {key!r} would replace a method of the config: rename it")
    layer_types = keys.get("layer_types") or []
    if not isinstance(layer_types, list) or any(layer != "full_attention" for layer in layer_types):
        raise ValueError(f"layer_types={layer_types}: every MiniMind layer is full_attention")
    num_labels = keys.get("num_labels", 2)
    if not isinstance(num_labels, int) or not 0 < num_labels <= 1_000_000:
        raise ValueError(f"num_labels={num_labels}: it must be a whole number from 1 to 1,000,000")
