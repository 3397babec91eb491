"""Registers MiniMind with vLLM, which finds `register` by the entry point `vllm.general_plugins`."""


def register():
    """Let vLLM load MiniMind folders through its Transformers backend; called in each of its processes."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import minimind_hf  # noqa: F401 (registers the Auto classes)

    # The backend for mixtures of experts is that for dense models, and replaces experts where it finds any. From the
    # causal model vLLM derives the trunk and the classifiers by itself.
    backend = "vllm.model_executor.models.transformers:TransformersMoEForCausalLM"
    ModelRegistry.register_model("MiniMindForCausalLM", backend)
    MODELS_CONFIG_MAP["MiniMindForCausalLM"] = Limits


class Limits:
    """What vLLM calls with the settings of a model and its engine, before anything is loaded."""

    @staticmethod
    def verify_and_update_model_config(model_config):
        """Check nothing yet: vLLM calls this first, and knows the platform and the rest below."""

    @staticmethod
    def verify_and_update_config(vllm_config):
        """Raise ValueError where vLLM would compute something else than MiniMind, or fail at the first request."""
        from vllm.platforms import current_platform

        config = vllm_config.model_config.hf_config
        if config.use_moe and config.hidden_act not in ("silu", "swish"):
            raise ValueError(
                f"hidden_act={config.hidden_act!r}: experts in vLLM's Transformers backend always compute silu"
            )
        if config.rope_parameters["rope_type"] == "dynamic":
            raise ValueError(
                "rope_type='dynamic': in vLLM the frequencies of a prompt would depend on the prompts beside it"
            )
        if current_platform.is_cpu():
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            sizes = CPUAttentionBackend.get_supported_head_sizes()
            if config.head_dim not in sizes:
                raise ValueError(f"head_dim={config.head_dim}: vLLM's attention on the CPU has only heads of {sizes}")
