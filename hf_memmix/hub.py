"""Finds the folder of a model by its name: a folder on this machine, or NAME/MODEL on the Hub."""

import re
from pathlib import Path

from .errors import UserError

# the files of a repository that a model and its tokenizer need
MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_folder(name: Path | None) -> Path | None:
    """The folder of a model. A folder on this machine comes first, then the Hub, whose files are kept in its cache.

    A name without the form NAME/MODEL is a folder, whether it exists or not. None stays None.

    Raises:
        ValueError: there is no such folder, and the Hub has no such model, or it cannot be reached.
    """
    if name is None or name.exists() or not _HUB_ID.fullmatch(str(name)) or name.parts[0] in (".", ".."):
        return name
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalEntryNotFoundError

    missing = f"{str(name)!r} is not a folder on this machine"
    try:
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=MODEL_FILES))
    except LocalEntryNotFoundError:
        raise UserError(
            f"{missing}, the Hub cannot be reached (or HF_HUB_OFFLINE is set), and its cache on this machine does not"
            " have the model; give a folder, or download the model where there is a network: hf download " + str(name)
        ) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        remedy = {401: "it does not exist, or needs a login (hf auth login)", 403: "your token may not read it"}
        reason = remedy.get(status, error.server_message or str(error).splitlines()[0])
        raise UserError(f"{missing}, and the Hub refuses it ({status}): {reason}") from None
    except HFValidationError as error:
        raise UserError(f"{missing} and not a valid name of a model on the Hub: {error}") from None
    except HTTPError as error:  # the connection failed
        raise UserError(f"{missing}, and the Hub cannot be reached ({error})") from None
