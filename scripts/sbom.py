"""Prints what set-up installs as an SBOM, CycloneDX 1.5 in JSON: from lock/, without looking at what is installed.

    make sbom                 build/sbom.cdx.json
    python3 scripts/sbom.py

Components are the packages of lock/*.txt with the SHA-256s of their files, and in them the libraries that they bring
along (lock/native.json). Known advisories stand with what is said of them in lock/advisories.json. The operating
system's packages are not in it: `dpkg-query -W` lists those. The same lock/ gives the same bytes.
"""

import json
import re
import uuid
from pathlib import Path
from typing import Any

LOCK = Path(__file__).parents[1] / "lock"


def locked() -> dict[str, dict[str, list[str]]]:
    """File of lock/ -> "name==version" -> SHA-256s."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(LOCK.glob("*.txt")):
        entries: dict[str, list[str]] = {}
        text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
        for line in text.splitlines():
            requirement, *hashes = line.split("--hash=sha256:")
            entries[requirement.partition(";")[0].strip()] = [word.strip() for word in hashes]
        found[path.stem] = entries
    return found


def purl(pinned: str) -> str:
    name, version = pinned.split("==")
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"


def component(pinned: str, hashes: list[str], groups: list[str], parts: dict[str, str]) -> dict[str, Any]:
    name, version = pinned.split("==")
    made: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": purl(pinned)}
    made["bom-ref"] = purl(pinned)
    made["scope"] = "required"
    made["hashes"] = [{"alg": "SHA-256", "content": text} for text in sorted(hashes)]
    made["properties"] = [{"name": "lock", "value": group} for group in groups]
    if parts:
        made["components"] = [
            {"type": "library", "name": part, "bom-ref": f"{purl(pinned)}#{part}"} | ({"version": at} if at else {})
            for part, at in parts.items()
        ]
    return made


def vulnerability(advisory: dict[str, Any]) -> dict[str, Any]:
    part = f"#{advisory['part']}" if "part" in advisory else ""
    analysis = {"state": advisory["state"], "detail": f"{advisory['date']}: {advisory['reason']}"}
    if advisory["state"] == "not_affected":
        analysis["justification"] = "code_not_reachable"
    return {
        "id": advisory["id"],
        "description": advisory["what"],
        "analysis": analysis,
        "affects": [{"ref": purl(advisory["in"]) + part}],
    }


def sbom() -> dict[str, Any]:
    native = json.loads((LOCK / "native.json").read_text())
    groups: dict[str, list[str]] = {}
    hashes: dict[str, list[str]] = {}
    for group, entries in locked().items():
        for pinned, found in entries.items():
            groups.setdefault(pinned, []).append(group)
            hashes[pinned] = found
    components = [
        component(pinned, hashes[pinned], groups[pinned], native.get(pinned, {}).get("parts", {}))
        for pinned in sorted(hashes)
    ]
    vulnerabilities = [vulnerability(item) for item in json.loads((LOCK / "advisories.json").read_text())]
    content = {"components": components, "vulnerabilities": vulnerabilities}
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "partial-fc", "bom-ref": "partial-fc"}},
        **content,
    }


if __name__ == "__main__":
    print(json.dumps(sbom(), indent=1))
