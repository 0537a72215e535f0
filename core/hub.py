"""`hf:ORG/NAME[@REV]`: a model from the Hugging Face hub, by huggingface_hub's own client, login and cache.

Only weights in safetensors, JSON and tokenizer files are asked for: no pickle, no code.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter

_REFERENCE = re.compile(r"^hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?$")
_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.jinja", "tokenizer*.txt", "merges.txt", "vocab.txt"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one revision, on this machine. revision: the commit that the name came to."""

    repository: str
    path: Path
    revision: str


def fetch_snapshot(ref: str, reporter: Reporter) -> Snapshot:
    """Raises Refused when the reference is malformed or the hub does not give it; nothing else is tried."""
    match = _REFERENCE.match(ref)
    if match is None:
        raise Refused(f"Model reference {ref!r} must have the form hf:ORG/NAME or hf:ORG/NAME@REVISION.")
    repository, revision = match["repository"], match["revision"]

    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    reporter.say(f"Fetching {repository}{'@' + revision if revision else ''} from the Hugging Face hub ...")
    try:
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Refused(
            f"{ref} could not be fetched from the Hugging Face hub: {reason.rstrip('.')}. "
            "Check the name, the network and `hf auth login`, or give a local directory."
        ) from error
    return Snapshot(repository, path, path.name)
