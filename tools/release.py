"""Check that all places that name the version agree: `make release`.

    python tools/release.py                 ncz_plugins/version.py, CITATION.cff and the newest version of CHANGELOG.md
    python tools/release.py --tag v1.2.3    and a tag; then CHANGELOG.md begins with that version, and says of which day

On GitHub, where a tag has started the workflow, that tag is taken. Uses the standard library only.
"""

import argparse
import os
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TAG = "refs/tags/"
FAILED = 1


def main(root: Path = ROOT) -> int:
    """Print what disagrees, or the version. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reference = os.environ.get("GITHUB_REF", "")
    of_workflow = reference.removeprefix(TAG) if reference.startswith(TAG) else None
    parser.add_argument("--tag", default=of_workflow, help="the tag of a release, such as v1.2.3")
    tag = parser.parse_args().tag
    version, found = differences(root, tag)
    for difference in found:
        print(f"error: {difference}", file=sys.stderr)
    if not found:
        print(f"{version}: all places agree" + (f", and so does the tag {tag}" if tag else ""))
    return FAILED if found else 0


def differences(root: Path, tag: str | None) -> tuple[str, list[str]]:
    """The version of the package, and a sentence on each place in the folder `root` that does not fit it."""
    version = runpy.run_path(str(root / "ncz_plugins" / "version.py"))["__version__"]
    cited = re.search(r"^version: *(\S+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    headings = re.findall(r"^## +(.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    numbered = [heading for heading in headings if heading[0].isdigit()]
    newest = numbered[0].split()[0] if numbered else None
    found = []
    if not cited or cited[1] != version:
        found.append(f"CITATION.cff has version {cited and cited[1]}, ncz_plugins/version.py has {version}")
    if newest != version:
        found.append(f"CHANGELOG.md's newest version is {newest}, ncz_plugins/version.py has {version}")
    if tag is not None:
        if tag != f"v{version}":
            found.append(f"the tag is {tag}, and that of ncz_plugins/version.py would be v{version}")
        if not headings or not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", headings[0]):
            first = headings[0] if headings else None
            found.append(f"CHANGELOG.md begins with '{first}', a release needs '{version} - YYYY-MM-DD', its day")
    return version, found


if __name__ == "__main__":
    sys.exit(main())
