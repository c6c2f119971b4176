"""`memmix generate`: continue a prompt."""

from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.commands.checks import check_placement, given_model, library
from hf_memmix.commands.common import Device, DeviceMap, Json, err, load, print_json, tokenizer_of
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.errors import UserError


@one_line_errors
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    model: Annotated[Path | None, typer.Option(help="A folder or a Hub id; default: the bundled GKA model.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of new tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Temperature of the sampling; 0 takes the most likely token.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens that have this probability together."),
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**64 - 1, help="Seed of the sampling.")] = 0,
    device: Device = None,
    device_map: DeviceMap = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt and print the text as it is generated."""
    import time

    from hf_memmix.assets import asset_path

    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--prompt is not UTF-8 (character {error.start} is a byte of another encoding); convert it, e.g. by iconv"
        ) from None
    if not prompt:
        raise UserError("the prompt is empty; give at least one word")
    check_placement(device, device_map)
    folder = given_model(model) or asset_path("tiny_gka")
    with library():
        import torch
        from transformers import TextStreamer

        from hf_memmix.conversion.limits import check_length, check_tokens

    network, tokenizer = load(folder, device, device_map=device_map), tokenizer_of(folder)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=True).to(network.device)
    if inputs["input_ids"].shape[1] == 0:
        raise UserError("the prompt is empty; give at least one word")
    check_tokens(inputs["input_ids"][0].tolist(), network, tokenizer, "--prompt")
    total = inputs["input_ids"].shape[1] + max_new_tokens
    check_length(network, "model", total, "prompt with --max-new-tokens", "ask for fewer")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    streamer = None if as_json else TextStreamer(tokenizer, skip_special_tokens=True)
    start = time.perf_counter()
    tokens = network.generate(**inputs, **sampling, max_new_tokens=max_new_tokens, streamer=streamer)[0]
    seconds = time.perf_counter() - start
    new = len(tokens) - inputs["input_ids"].shape[1]
    if as_json:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        print_json(
            {"model": str(model or folder), "text": text, "new_tokens": new, "tokens_per_second": new / seconds}
        )
    else:
        err.print(f"{new} tokens, {new / seconds:.1f} tokens/s", style="dim")
