"""Token graphs inside Hugging Face's models.

from graphattn.integrations import transformers as gat

gat.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="graphattn")
gat.configure(model, mixer="krause", window=256, top_k=64, layers=range(4, 12))
model.save_pretrained(folder)
model = gat.from_pretrained(folder)
"""

try:
    import transformers  # noqa: F401
except ImportError:
    raise ImportError(
        "the plug-in needs transformers: install it with pip install 'graphattn[transformers]'"
    ) from None

from graphattn.integrations.transformers.configure import configure, configured, register
from graphattn.integrations.transformers.conversion.convert import convert
from graphattn.integrations.transformers.files.loading import from_pretrained
from graphattn.integrations.transformers.shortcut.add import add_krause_shortcut
from graphattn.near_names import explain_functions

__all__ = [
    "add_krause_shortcut",
    "configure",
    "configured",
    "convert",
    "from_pretrained",
    "register",
]

explain_functions(globals(), __all__)
