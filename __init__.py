"""MiniMind checkpoints as Hugging Face models. `import minimind_hf` registers them with every Auto class."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from minimind_hf.configuration_minimind import MiniMindConfig
from minimind_hf.modeling_minimind import (
    MiniMindForCausalLM,
    MiniMindForQuestionAnswering,
    MiniMindForSequenceClassification,
    MiniMindForTokenClassification,
    MiniMindModel,
    MiniMindPreTrainedModel,
)

__version__ = "0.1.0"

__all__ = [
    "MiniMindConfig",
    "MiniMindForCausalLM",
    "MiniMindForQuestionAnswering",
    "MiniMindForSequenceClassification",
    "MiniMindForTokenClassification",
    "MiniMindModel",
    "MiniMindPreTrainedModel",
]

AutoConfig.register(MiniMindConfig.model_type, MiniMindConfig, exist_ok=True)
MiniMindConfig.register_for_auto_class()
for _auto_class, _model_class in (
    (AutoModel, MiniMindModel),
    (AutoModelForCausalLM, MiniMindForCausalLM),
    (AutoModelForSequenceClassification, MiniMindForSequenceClassification),
    (AutoModelForTokenClassification, MiniMindForTokenClassification),
    (AutoModelForQuestionAnswering, MiniMindForQuestionAnswering),
):
    _auto_class.register(MiniMindConfig, _model_class, exist_ok=True)
    _model_class.register_for_auto_class(_auto_class.__name__)
