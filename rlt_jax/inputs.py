"""What a caller hands to generate(), checked and brought to one form."""

from collections.abc import Iterable, Mapping, Sequence

from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import fail, plain_number

Prompt = str | Sequence[int]


def check_prompts(prompts: object) -> list[Prompt]:
    """One prompt or many as a list of strings and lists of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        fail("prompts", prompts, "must be a string, token ids, or a list of these")
    prompts = list(prompts)
    if prompts and _is_integer(prompts[0]):
        return [_check_token_ids("prompts", prompts)]
    return [
        prompt if isinstance(prompt, str) else _check_token_ids(f"prompts[{i}]", prompt)
        for i, prompt in enumerate(prompts)
    ]


def _check_token_ids(name: str, prompt: object) -> list[int]:
    if not _is_list(prompt):
        fail(name, prompt, "must be a string or a list of token ids")
    prompt = list(prompt)
    if set(map(type, prompt)) <= {int}:
        return prompt
    for i, token in enumerate(prompt):
        if not _is_integer(token):
            fail(f"{name}[{i}]", token, "must be an integer token id")
    return [plain_number(token) for token in prompt]


def _is_list(value: object) -> bool:
    """Something to go through; an array of rank 0 has __iter__ too, and raises in it."""
    if isinstance(value, (bytes, bytearray, Mapping)) or getattr(value, "ndim", 1) == 0:
        return False
    return isinstance(value, Iterable)


def _is_integer(value: object) -> bool:
    """One integer of any library; arrays of rank 1 and more are lists of them, even of length 1."""
    value = plain_number(value)
    return isinstance(value, int) and not isinstance(value, bool)


def check_sampling_params(value: object, count: int) -> list[SamplingParams]:
    """One SamplingParams (None: the defaults) or a list of them, as one for each prompt."""
    if value is None or isinstance(value, SamplingParams):
        return [value or SamplingParams()] * count
    if not isinstance(value, (list, tuple)):
        fail("sampling_params", value, "must be a SamplingParams or a list of them")
    _check_length("sampling_params", value, count)
    for i, params in enumerate(value):
        if not isinstance(params, SamplingParams):
            fail(f"sampling_params[{i}]", params, "must be a SamplingParams")
    return list(value)


def check_request_ids(value: object, count: int) -> list[str]:
    """As many ids as prompts, all different."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)):
        fail("request_ids", value, "must be a list of strings")
    _check_length("request_ids", value, count)
    seen = set()
    for i, request_id in enumerate(value):
        if not isinstance(request_id, str) or not request_id:
            fail(f"request_ids[{i}]", request_id, "must be a non-empty string")
        if request_id in seen:
            fail(f"request_ids[{i}]", request_id, "must differ from the others")
        seen.add(request_id)
    return list(value)


def _check_length(name: str, value: Sequence[object], count: int) -> None:
    if len(value) != count:
        raise ValueError(f"len({name}) = {len(value)}: must be the number of prompts, {count}")
