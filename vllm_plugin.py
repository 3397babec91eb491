"""Registers MiniMind with vLLM, which finds `register` by the entry point `vllm.general_plugins`."""


def register():
    """Let vLLM load MiniMind folders through its Transformers backend; called in each of its processes."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import minimind_hf  # noqa: F401 (registers the Auto classes)

    # The backend for mixtures of experts is that for dense models, and replaces experts where it finds any. From the
    # causal model vLLM makes the trunk and the classifiers by itself.
    backend = "vllm.model_executor.models.transformers:TransformersMoEForCausalLM"
    ModelRegistry.register_model("MiniMindForCausalLM", backend)
    MODELS_CONFIG_MAP["MiniMindForCausalLM"] = WhatVLLMComputesRightly


class WhatVLLMComputesRightly:
    """What vLLM asks about a model's settings before it loads any weights."""

    @staticmethod
    def verify_and_update_model_config(model_config):
        """Called for each model; all is checked below, where the settings of the engine are known too."""

    @staticmethod
    def verify_and_update_config(vllm_config):
        """Raise ValueError where vLLM's layers would compute something else than MiniMind, or break down later."""
        from vllm.platforms import current_platform

        config = vllm_config.model_config.hf_config
        if config.use_moe and config.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act={config.hidden_act!r}: the experts of vLLM's Transformers backend know only silu")
        if config.rope_parameters["rope_type"] == "dynamic":
            raise ValueError(
                "rope_type='dynamic': in vLLM the frequencies of a prompt would depend on the prompts beside it"
            )
        if current_platform.is_cpu():
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            sizes = CPUAttentionBackend.get_supported_head_sizes()
            if config.head_dim not in sizes:
                raise ValueError(f"head_dim={config.head_dim}: vLLM's attention on the CPU has only heads of {sizes}")
