"""Registers MiniMind with vLLM, which finds `register` by the entry point `vllm.general_plugins`."""


def register():
    """Let vLLM load MiniMind folders through its Transformers backend; called in each of its processes."""
    from vllm import ModelRegistry

    import minimind_hf  # noqa: F401 (registers the Auto classes)

    # The backend for mixtures of experts is that for dense models, and replaces experts where it finds any.
    backend = "vllm.model_executor.models.transformers:TransformersMoEForCausalLM"
    ModelRegistry.register_model("MiniMindForCausalLM", backend)
