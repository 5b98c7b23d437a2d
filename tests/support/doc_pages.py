"""The pages of the documentation."""

from paths import ROOT

# For the folder of skills of a coding agent: it begins with YAML, which is no part of its text.
SKILL = ROOT / "docs" / "SKILL.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page != SKILL),
]
