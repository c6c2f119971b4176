"""`memmix card` writes a model's card from measured JSON, `memmix push` uploads folder and card to the Hub."""

import os
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.commands.checks import library
from hf_memmix.commands.common import Json, err, out, print_json
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.errors import UserError

Folder = Annotated[Path, typer.Argument(help="Folder of a converted model.")]
_REPO = "Repository on the Hub, NAME/MODEL"
# files in the folder of a run that are not part of a model
NOT_UPLOADED = [".*", "**/.*", "checkpoint-*/**", "*.tmp", "optimizer*", "runs/**"]


@one_line_errors
def card(
    model: Folder,
    repo: Annotated[str | None, typer.Argument(help=f"{_REPO}, which the example names; default: the folder.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="JSON file with the output of memmix report --json on this model. [required]")
    ] = None,
    base_model: Annotated[str | None, typer.Option(help="Name of the teacher on the Hub. [required]")] = None,
    license_name: Annotated[
        str | None,
        typer.Option(
            "--license", help="License of the teacher, by its identifier on the Hub, e.g. apache-2.0. [required]"
        ),
    ] = None,
    language: Annotated[str, typer.Option(help="Language code of the model, e.g. en.")] = "en",
    probes: Annotated[Path | None, typer.Option(help="The file probes.json of memmix eval on this model.")] = None,
    stage: Annotated[
        list[Path] | None, typer.Option(help="JSON file with the output of align or distill --json; repeatable.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="The plan of memmix select that the model was converted by.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing card.")] = False,
) -> None:
    """Write the card (README.md) of a converted model from measurements in JSON files."""
    from hf_memmix.conversion.written import add_to_marker, check_file
    from hf_memmix.training.card import student_config
    from hf_memmix.training.card_inputs import read_plan, read_probes, read_report, read_stage

    required = {"--report": report, "--base-model": base_model, "--license": license_name}
    if missing := [name for name, value in required.items() if value is None]:  # typer would name the first one alone
        raise typer.BadParameter("it is required; see memmix card --help", param_hint=" ".join(missing))
    student_config(model)
    target = model / "README.md"
    check_file(target, overwrite, r"<!-- weights [0-9a-f]{64} -->", "a card")
    measured = {
        "probes": None if probes is None else read_probes(probes),
        "stages": [read_stage(path) for path in stage or []],
        "plan": None if plan is None else read_plan(plan),
    }
    result = read_report(report)
    with library():
        from hf_memmix.training.card import is_other_base_model, student_card

    about = {"base_model": base_model, "license": license_name, "repo": repo, "language": language}
    content = student_card(model, result, **about, **measured)
    if is_other_base_model(result, base_model):
        err.print(
            f"warning: {base_model} in the Hub's cache on this machine has other weights or another config.json than"
            " the teacher of the report; is it the teacher?",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    part = target.with_name(".README.md.part")
    part.write_text(content, encoding="utf-8")
    os.replace(part, target)
    add_to_marker(target)
    out.print(f"wrote {target}")


@one_line_errors
def push(
    model: Folder,
    repo: Annotated[str, typer.Argument(help=f"{_REPO}; it is created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to upload to; default: main.")] = None,
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Upload by memmix push",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be uploaded.")] = False,
    as_json: Json = False,
) -> None:
    """Upload a model with its card in one commit to the Hub, or to the server named by HF_ENDPOINT."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    from hf_memmix.training.card import check_card, student_config

    student_config(model)
    check_card(model)
    if dry_run:
        _list_upload(model, repo, revision, as_json)
        return
    token = huggingface_hub.get_token()
    if token is None:
        raise UserError(
            "there is no token for the Hub; run `hf auth login`, or set HF_TOKEN to a token with write access"
        )
    api = huggingface_hub.HfApi(token=token)
    try:
        with err.status(f"uploading to {api.endpoint}"):
            url = api.create_repo(repo, private=private or None, exist_ok=True)
            commit = api.upload_folder(
                repo_id=url.repo_id, folder_path=model, revision=revision, commit_message=message,
                ignore_patterns=NOT_UPLOADED,
            )  # fmt: skip
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        remedy = {401: "; the token is not valid there", 403: "; the token may not write there"}.get(status, "")
        answer = error.server_message or str(error).splitlines()[0]
        raise UserError(f"{api.endpoint} refused {repo!r} ({status}): {answer}{remedy}") from None
    except HTTPError as error:  # the connection failed
        raise UserError(f"{api.endpoint} cannot be reached ({error}); nothing was committed") from None
    if as_json:
        print_json({"repo": url.repo_id, "url": str(url), "commit": commit.oid})
    else:
        out.print(f"{url} is at commit {commit.oid}")


def _list_upload(model: Path, repo: str, revision: str | None, as_json: bool) -> None:
    """Print the files that `push` would upload, with their sizes; no request is sent to the Hub."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import filter_repo_objects, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{repo!r} is not a valid name on the Hub: {error}") from None
    names = sorted(path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file())
    files = {name: (model / name).stat().st_size for name in filter_repo_objects(names, ignore_patterns=NOT_UPLOADED)}
    if as_json:
        print_json({"repo": repo, "revision": revision or "main", "files": files, "dry_run": True})
        return
    for name, size in files.items():
        out.print(f"{size:>15,} bytes  {name}", highlight=False)
    where = f"{huggingface_hub.constants.ENDPOINT}/{repo}"
    out.print(f"would be uploaded to {where}, revision {revision or 'main'}; nothing was sent", highlight=False)
