"""A double of a Python that has nvidia-modelopt: stands at the process boundary, computes nothing.

Run by the file `python` that the fixture writes, with that file's directory as first argument. It answers the
probe, `-m venv`, `-m pip` and the script as `behaviour.json` there says. A double proves our side of the
boundary only.
"""

import hashlib
import json
import shutil
import stat
import sys
from pathlib import Path


def main(home: Path, arguments: list[str]) -> int:
    behaviour = json.loads((home / "behaviour.json").read_text())
    with (home / "calls.jsonl").open("a") as file:
        file.write(json.dumps(arguments) + "\n")
    if arguments[:2] == ["-I", "-c"]:
        print(json.dumps(behaviour["versions"]))
        return 0
    if arguments[:2] == ["-m", "venv"]:
        return make_environment(home, Path(arguments[2]))
    if arguments[:2] == ["-m", "pip"]:
        print("ERROR: No matching distribution" if behaviour["pip_fails"] else "Successfully installed")
        return 1 if behaviour["pip_fails"] else 0
    return quantize(home, behaviour, json.loads(Path(arguments[2]).read_text()))


def make_environment(home: Path, target: Path) -> int:
    (target / "bin").mkdir(parents=True)
    python = target / "bin" / "python"
    shutil.copy(home / "python", python)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return 0


def quantize(home: Path, behaviour: dict[str, object], request: dict[str, object]) -> int:
    (home / "request.json").write_text(json.dumps(request))
    for index in range(30):
        print(f"line {index}", flush=True)
    if behaviour["crashes"]:
        print("RuntimeError: out of memory", file=sys.stderr)
        return 3
    digest = None
    if request["tokens"] is not None:
        data = Path(str(request["tokens"])).read_bytes()
        shutil.copy(str(request["tokens"]), home / "tokens.safetensors")
        # safetensors: eight bytes of length, a header of that length, then the one tensor's bytes
        digest = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
    shutil.copytree(home / "export", str(request["out"]))
    result = {"versions": behaviour["versions"], "token_digest": digest, "seconds": 2.1}
    Path(str(request["result"])).write_text(json.dumps(result | dict(behaviour["result"])))  # type: ignore[call-overload]
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
