"""Write docs/config.md from the fields of MiniMindConfig and the comments beside them.

python docs/make_config_page.py
"""

import inspect
import re
from pathlib import Path

from minimind_hf.configuration_minimind import MINIMIND2_DEFAULTS, MINIMIND2_KEYS, MiniMindConfig
from minimind_hf.convert.generations import EARLY_CONFIG_KEYS
from minimind_hf.convert.inspection import cache_bytes, count_active, count_parameters

PAGE = Path(__file__).parent / "config.md"
FIELD = re.compile(r"^    (\w+): ([^=]+?) = (.+?)  # (.+)$", re.MULTILINE)
EARLIER_NAMES = {new: old for old, new in {**MINIMIND2_KEYS, **EARLY_CONFIG_KEYS}.items()}
HEAD = """# Every key of config.json

<!-- Written by docs/make_config_page.py. Change the comments in configuration_minimind.py, and run it. -->

A config has the keys below, and keeps any other one as it is. The defaults are those of the published MiniMind-3, with
{parameters} parameters and {cache:,} bytes of cache for each token in float16. The last column says what becomes of
these when a size is doubled or a switch turned and nothing else is set; for keys of experts, beginning with the
published mixture of experts ({moe} parameters, {active} of them active for a token). `minimind inspect FOLDER` counts
them for a model.

"""
TABLE = "| key | meaning | default | in MiniMind2 | changes |\n|---|---|---|---|---|\n"


def millions(count: int) -> str:
    return f"{count / 1e6:.1f}M"


def figures(config: MiniMindConfig) -> dict[str, str]:
    found = {
        "parameters": millions(sum(count_parameters(config).values())),
        "active": millions(count_active(config)),
        "cache": f"{cache_bytes(config, 2):,} B",
    }
    if not config.use_moe:
        del found["active"]
    return found


def what_changes(name: str, kind: str, default) -> str:
    """Say what another value of a field does to the number of parameters and the size of the cache."""
    base = {"use_moe": True} if "expert" in name or name in ("moe_intermediate_size", "norm_topk_prob") else {}
    before = MiniMindConfig(**base)
    value = getattr(before, name)
    if name.endswith("_token_id") or isinstance(value, (str, dict, float)) or value is None:
        return ""
    other = not value if kind.startswith("bool") else 2 * value or 1
    old, new = figures(before), figures(MiniMindConfig(**{**base, name: other}))
    changed = [
        f"{key} {old.get(key, '')} → {figure}".replace("  ", " ")
        for key, figure in new.items()
        if old.get(key) != figure
    ]
    return f"{other}: {', '.join(changed)}" if changed else ""


def make_page() -> str:
    """Return the text of the page."""
    dense, experts = MiniMindConfig(), MiniMindConfig(use_moe=True)
    text = HEAD.format(
        parameters=millions(sum(count_parameters(dense).values())),
        cache=cache_bytes(dense, 2),
        moe=millions(sum(count_parameters(experts).values())),
        active=millions(count_active(experts)),
    )
    rows = []
    for name, kind, default, meaning in FIELD.findall(inspect.getsource(MiniMindConfig)):
        earlier = [f"`{MINIMIND2_DEFAULTS[name]}`"] if name in MINIMIND2_DEFAULTS else []
        earlier += [f"also named `{EARLIER_NAMES[name]}`"] if name in EARLIER_NAMES else []
        meaning = meaning.replace("<", "&lt;").replace("|", "&#124;")
        cells = [f"`{name}`", meaning, f"`{default}`", ", ".join(earlier), what_changes(name, kind, default)]
        rows.append(f"| {' | '.join(cells)} |".replace("  ", " "))
    return text + TABLE + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
