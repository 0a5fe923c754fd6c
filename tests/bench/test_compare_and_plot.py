"""bench compare and bench plot, on what the commands wrote."""

import json

import pytest

from rlt_jax.bench import compare, plot


@pytest.fixture
def changed(document, tmp_path):
    """Writes a document of COMMANDS with some rows' fields changed."""

    def write(name, file="changed.json", **fields):
        written = document(name)
        for row in written["rows"]:
            row.update({key: change(row[key]) for key, change in fields.items()})
        path = tmp_path / file
        path.write_text(json.dumps(written))
        return str(path)

    return write


def test_ratios_are_the_second_file_s_figures_by_the_first_s(measured, changed):
    before = str(measured("throughput"))
    after = changed("throughput", tokens_per_s=lambda x: 2 * x, ttft_mean=lambda x: x / 4)
    command, rows = compare.compare(before, after)
    assert command == "throughput"
    assert [row.case["requests"] for row in rows] == [1, 4]
    for row in rows:
        assert row.ratios["tokens_per_s"] == 2
        assert row.ratios["ttft_mean"] == 0.25
        assert row.ratios["tpot_p99"] == row.ratios["peak_bytes"] == 1


def test_rows_that_only_one_file_has_are_left_out(measured, changed, document, tmp_path):
    written = document("decode")
    written["rows"] = [row for row in written["rows"] if row["batch"] == 4]
    path = tmp_path / "few.json"
    path.write_text(json.dumps(written))
    _, rows = compare.compare(str(measured("decode")), str(path))
    assert [(row.case["batch"], row.case["kernels"]) for row in rows] == [
        (4, "auto"),
        (4, "reference"),
    ]


def test_implementations_of_two_files_can_be_compared(document, tmp_path):
    paths = []
    for kernels in ("auto", "reference"):
        written = document("decode")
        written["rows"] = [row for row in written["rows"] if row["kernels"] == kernels]
        paths.append(tmp_path / f"{kernels}.json")
        paths[-1].write_text(json.dumps(written))
    _, rows = compare.compare(*map(str, paths))
    assert [row.case["kernels"] for row in rows] == ["auto -> reference"] * 2


def test_what_was_not_measured_has_no_ratio(measured, changed):
    after = changed("decode", fraction=lambda _: None)
    _, rows = compare.compare(str(measured("decode")), after)
    assert all(row.ratios["fraction"] is None for row in rows)


@pytest.mark.parametrize("name", ["roofline", "prefill", "kernels", "closed"])
def test_every_command_can_be_compared(measured, name):
    _, rows = compare.compare(str(measured(name)), str(measured(name)))
    assert rows
    ratios = [ratio for row in rows for ratio in row.ratios.values() if ratio is not None]
    assert ratios and set(ratios) == {1}


def test_files_of_different_commands_are_refused(measured):
    decode, throughput = str(measured("decode")), str(measured("throughput"))
    with pytest.raises(ValueError) as refused:
        compare.compare(decode, throughput)
    assert str(refused.value) == (
        f"{throughput}: command = 'throughput': must be 'decode', that of {decode}"
    )


def test_files_without_a_common_case_are_refused(measured, changed):
    after = changed("throughput", prompt=lambda _: 9)
    with pytest.raises(ValueError, match=f"{after}: no row has the same requests, prompt"):
        compare.compare(str(measured("throughput")), after)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "must be JSON that `rlt-jax bench` wrote"),
        ("[]", "it has no rows"),
        ('{"rows": []}', "format = None: must be 1"),
        ('{"rows": [], "format": 1, "command": "x"}', "command = 'x': must be one of roofline"),
        ('{"rows": [], "format": 1, "command": ["x"]}', "command = ['x']: must be one of roofline"),
        ('{"rows": [{}], "format": 1, "command": "decode"}', "a row has no batch"),
        ('{"rows": [3], "format": 1, "command": "decode"}', "a row = 3: must be an object"),
    ],
)
def test_files_that_bench_did_not_write_are_refused(measured, tmp_path, text, message):
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        compare.compare(str(path), str(path))
    assert str(refused.value).startswith(f"{path}: ") and message in str(refused.value)


@pytest.mark.parametrize("figure", ["12", [1], True, {}, float("nan"), float("inf")], ids=repr)
def test_a_figure_that_is_no_number_is_refused(measured, changed, figure):
    right, wrong = str(measured("decode")), changed("decode", fraction=lambda _: figure)
    for files in ((right, wrong), (wrong, right)):
        with pytest.raises(ValueError) as refused:
            compare.compare(*files)
        message = f"{wrong}: fraction = {figure!r}: must be a finite number or null"
        assert str(refused.value) == message
    with pytest.raises(ValueError, match=r"changed.json: fraction = .*: must be a finite number"):
        plot.read_lines([wrong], ["a"])


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"/no/file.json: cannot be read: No such file"):
        compare.compare("/no/file.json", "/no/file.json")


def test_a_line_for_every_file_and_implementation(measured):
    command, lines = plot.read_lines([str(measured("decode"))] * 2, ["a", "b"])
    assert command == "decode"
    assert [line.label for line in lines] == [
        "a, kernels auto",
        "a, kernels reference",
        "b, kernels auto",
        "b, kernels reference",
    ]
    assert [x for x, _ in lines[0].points] == [1, 4]


@pytest.mark.parametrize("name, suffix", [("decode", "png"), ("throughput", "svg")])
def test_charts(measured, tmp_path, name, suffix):
    picture = tmp_path / f"chart.{suffix}"
    plot.plot([str(measured(name))] * 2, str(picture), ["one", "two"], "A title")
    start = picture.read_bytes()[:100]
    assert start.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_what_cannot_be_drawn_is_refused(measured, tmp_path):
    decode = str(measured("decode"))
    picture = str(tmp_path / "chart.png")
    with pytest.raises(ValueError, match=r"--output = '.*\.pdf': must end in .png or .svg"):
        plot.plot([decode], "chart.pdf")
    with pytest.raises(ValueError, match=r"--output = '/no/.*: must be in a folder that exists"):
        plot.plot([decode], "/no/chart.png")
    with pytest.raises(
        ValueError, match=r"--label = \['a'\]: must be given once for each of the 2"
    ):
        plot.plot([decode, decode], picture, ["a"])
    with pytest.raises(ValueError, match="command = 'prefill': must be one of decode"):
        plot.plot([str(measured("prefill"))], picture)
    with pytest.raises(ValueError, match="command = 'throughput': must be 'decode'"):
        plot.plot([decode, str(measured("throughput"))], picture)
    with pytest.raises(ValueError, match="fraction = None: it was measured without a roofline"):
        plot.plot([str(measured("mixed"))], picture)
