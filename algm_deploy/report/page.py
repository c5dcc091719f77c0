"""One self-contained HTML page about a bundle: what was deployed, what it computes, what merging costs, how fast it is.

Every figure comes from the records in the manifests; what was not run says so, with the reason. The page loads nothing
and runs nothing: style, plots and pictures are inside, and its content security policy forbids the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from algm_deploy import __version__
from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.records import NOT_RUN
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.recipe.schema import Network
from algm_deploy.report.gallery import Example, Gallery, data_url
from algm_deploy.report.plots import Series, histogram, scatter
from algm_deploy.report.published import Published, published_beside, read_published
from algm_deploy.report.records import (
    EVALUATION,
    PARITY,
    SPEED,
    Measured,
    baseline,
    comparable,
    joined,
    measured,
    plan_in_force,
    plan_name,
    plan_r,
)
from algm_deploy.report.tables import (
    CONDITIONS,
    UNKNOWN,
    class_table,
    cost_table,
    engine_table,
    environment_table,
    html_table,
    joined_table,
    merged_plan,
    merges_of,
    parity_table,
    published_name,
    published_table,
    quality_table,
    runs_table,
    shown,
    slice_table,
    speed_notes,
    speed_table,
)
from algm_deploy.report.tuning import tuning_section
from algm_deploy.runners.contract import RUNTIMES
from algm_deploy.wording import counted, dataset_name, merge_title, shown_merges

_STYLE = Path(__file__).with_name("page.css")
_MANY_CLASSES = 30
_COMMANDS = {
    PARITY: "verify {} --runtime {}",
    EVALUATION: "evaluate {} --runtime {} --data FOLDER",
    SPEED: "bench {} --runtime {}",
}
_SEMANTICS = {"code": "as the published code makes them", "paper": "as the paper's text says"}
_BATCHING = {"per_image": "every window for itself", "batch_min": "windows of a batch share counts and thresholds"}
_STEPS = {PARITY: "parity", EVALUATION: "mIoU", SPEED: "speed"}


def write_report(bundles: Sequence[Bundle], target: Path, gallery: Gallery | None = None) -> Path:
    """Writes the page of the first bundle; the others stand beside it where their records can be compared.

    `variants/dense` and `variants/truncated` inside the first bundle are added by themselves.

    Raises:
        BundleError: a bundle is incomplete, or the page cannot be written.
    """
    variants = [bundles[0].path / "variants" / name for name in ("dense", "truncated")]
    beside = [*bundles[1:], *(Bundle.open(path) for path in variants if path.is_dir())]
    page = report_page(bundles[0], beside, gallery, read_published())
    if not target.parent.is_dir():
        raise BundleError(f"expected a folder for the report, got {target.parent}: create it first")
    with write_atomically(target) as path:
        path.write_text(page, encoding="utf-8")
    return target


def report_page(
    bundle: Bundle, beside: Sequence[Bundle] = (), gallery: Gallery | None = None, published: Sequence[Published] = ()
) -> str:
    """The page as one HTML text."""
    bundles = (bundle, *beside)
    evaluations = [row for one in bundles for row in measured(one, EVALUATION)]
    speeds = [row for one in bundles for row in measured(one, SPEED)]
    own = _by_weight(bundle, measured(bundle, EVALUATION))
    sections = (
        ("summary", "Summary", _summary(bundle, own)),
        ("parity", "Parity", _parity(bundle)),
        ("accuracy", "Accuracy", _accuracy(bundle, own)),
        ("cost", "What merging costs", _cost(bundle, evaluations)),
        ("speed", "Speed", _speed(bundle, evaluations, speeds)),
        ("tokens", "Tokens", _tokens(bundle, own)),
        ("trade-off", "Trade-off", _trade_off(bundle, evaluations, speeds, published)),
        *_tuning(bundle, gallery),
        ("gallery", "Gallery", _gallery(gallery)),
        ("published", "Beside published figures", _published(bundle, own, published)),
        ("environment", "Environment", _environment(bundles)),
    )
    nav = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{"".join(parts)}</section>' for name, title, parts in sections
    )
    name = escape(bundle.recipe.name)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<title>{name}: deployment report</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head><body>"
        f'<header><p class="kind">Deployment report</p><h1>{name}</h1></header>'
        f"<nav><ul>{nav}</ul></nav><main>{body}</main>"
        f"<footer>algm-deploy {__version__}</footer></body></html>\n"
    )


def _by_weight(bundle: Bundle, evaluations: Sequence[Measured]) -> list[Measured]:
    """The recipe's own plan before other thresholds, and more images before fewer."""
    plan = plan_in_force(bundle.recipe.merging, {})
    return sorted(evaluations, key=lambda row: (row.artifact.plan != plan, -row.record["images"]))


# ------------------------------------------------------------------------------------------------------------- summary


def _summary(bundle: Bundle, evaluations: Sequence[Measured]) -> Iterator[str]:
    yield _headline(bundle, evaluations)
    yield _facts(_deployed_facts(bundle))
    yield "<h3>What was executed where</h3>"
    yield html_table(
        ("runtime", "artifact", *_STEPS.values()), [_executed_row(bundle, name) for name in _runtimes(bundle)]
    )
    missing = [
        f"<li>{label} on {escape(runtime)}: {reason}</li>"
        for runtime in _runtimes(bundle)
        for step, label in _STEPS.items()
        if (reason := _why_not(bundle, step, runtime))
    ]
    if missing:
        yield f"<details><summary>Not run, and why ({len(missing)})</summary><ul>{''.join(missing)}</ul></details>"


def _headline(bundle: Bundle, evaluations: Sequence[Measured]) -> str:
    """Three facts that a reader wants first."""
    parity = bundle.section(PARITY)
    failed = [runtime for runtime, record in parity.items() if not record["passed"]]
    state = "not run" if not parity else "FAILED" if failed else "passed"
    cards = [("Parity", state, ", ".join(failed or parity) or "no runtime was verified")]
    if evaluations:
        record = evaluations[0].record
        where = f"{dataset_name(record)}, {counted(record['images'], 'images')}, {evaluations[0].runtime}"
        cards.append(("mIoU", f"{shown(record['miou_percent'], 2)} %", where + _beside_dense(evaluations)))
        tokens = [shown(record[f"tokens_after_{merge}_mean"], 0) for merge in merges_of(record)]
        rows, columns = bundle.recipe.network.grid
        if tokens:
            titles = ", then ".join(f"after {merge_title(merge)}" for merge in merges_of(record))
            cards.append(("Tokens", " → ".join((str(rows * columns), *tokens)), f"patches, then mean {titles}"))
    else:
        cards.append(("mIoU", "not run", "the bundle holds no evaluation"))
    items = "".join(
        f"<div{_state_class(value)}><dt>{title}</dt><dd>{escape(value)}</dd><p>{escape(note)}</p></div>"
        for title, value, note in cards
    )
    return f'<dl class="cards">{items}</dl>'


def _beside_dense(evaluations: Sequence[Measured]) -> str:
    """What the first evaluation is without merging, on the same pictures and runtime, where that was measured."""
    (group,) = (group for group in comparable(evaluations) if evaluations[0] in group)
    dense = baseline(group)
    if dense is None or dense is evaluations[0]:
        return ""
    return f"; {shown(dense.record['miou_percent'], 2)} % without merging"


def _deployed_facts(bundle: Bundle) -> list[tuple[str, str]]:
    recipe = bundle.recipe
    network, plan = recipe.network, recipe.merging
    size, patch = " x ".join(map(str, network.image_size)), network.patch_size
    weights = bundle.files["weights.safetensors"]
    made_from = ", ".join(f"{name} (SHA-256 {sha256[:12]}…)" for name, sha256 in weights.made_from.items())
    facts = [
        (
            "network",
            f"{network.family}, ViT of width {network.embed_dim} with {network.depth} blocks and {network.heads} heads",
        ),
        ("decoder", _decoder_words(network)),
        ("input", f"{size} pixels in patches of {patch}, {network.grid[0]} x {network.grid[1]} patches"),
        ("made from", made_from),
    ]
    if plan.method == "tome" and plan.layers:
        facts.append(("merging", f"ToMe: {plan_r(plan)} tokens merge, whatever the picture"))
    elif plan.layers:
        window = " x ".join(map(str, plan.window))
        layers = [f"CLAP in block {layer}, windows of {window}" for layer in plan.clap_layers]
        layers += [f"GBM in block {layer}, {plan.gbm_mode}" for layer in plan.gbm_layers]
        facts += [
            ("merging", "; ".join(layers)),
            (
                "thresholds",
                f"CLAP {plan.clap_threshold:g}, GBM {plan.gbm_threshold:g}: defaults of two inputs of the network",
            ),
            ("decisions", f"{_SEMANTICS[plan.semantics]}; {_BATCHING[plan.batch]}; token order {plan.order}"),
        ]
    else:
        facts.append(("merging", "none: this bundle is dense"))
    protocol = recipe.protocol
    facts += [
        (
            "protocol",
            f"{protocol.dataset}: short side {protocol.short_side}, window {protocol.window}, stride {protocol.stride}",
        ),
        ("output", f"{recipe.output}, {recipe.precision}, batches up to {recipe.max_batch}"),
    ]
    return facts


def _decoder_words(network: Network) -> str:
    blocks = f", {network.decoder_depth} blocks" if network.decoder in ("mask_transformer", "atm", "queries") else ""
    levels = f", tokens of blocks {', '.join(map(str, network.stages))}" if network.stages else ""
    return f"{network.decoder.replace('_', ' ')}{blocks}{levels}, {network.classes} classes"


def _executed_row(bundle: Bundle, runtime: str) -> tuple[str, ...]:
    cells = [runtime, _artifact(bundle, runtime)]
    for step in _STEPS:
        rows = [row for row in measured(bundle, step) if row.runtime == runtime]
        cells.append(_outcome(step, bundle, rows) if rows else "not run")
    return tuple(cells)


def _outcome(step: str, bundle: Bundle, rows: Sequence[Measured]) -> str:
    if step == PARITY:
        return "passed" if rows[0].record["passed"] else "FAILED"
    if step == EVALUATION:
        main = _by_weight(bundle, rows)[0]
        where = f"{_plan(main, bundle)}, {counted(main.record['images'], 'images')}"
        return f"{shown(main.record['miou_percent'], 2)} % ({where})"
    return ", ".join(dict.fromkeys(str(row.record.get("protocol", "done")) for row in rows))


def _artifact(bundle: Bundle, runtime: str) -> str:
    """The file a runtime executes, as far as this bundle has one."""
    candidates = {
        "torch": ("weights.safetensors",),
        "tensorrt": ("engines/tensorrt.engine",),
        "tensorrt-rtx": ("engines/tensorrt-rtx.engine",),
    }.get(runtime, (f"model.{runtime}.onnx", "model.onnx"))
    return next((name for name in candidates if name in bundle.files), "not built")


def _runtimes(bundle: Bundle) -> list[str]:
    recorded = [row.runtime for step in _STEPS for row in measured(bundle, step)]
    missing = [key.partition(" ")[2] for key in bundle.fact(NOT_RUN, {})]
    return list(dict.fromkeys((*RUNTIMES, *bundle.section("engines"), *recorded, *missing)))


def _why_not(bundle: Bundle, step: str, runtime: str) -> str:
    """Why a step has no record for a runtime, as HTML; empty where it has one."""
    if any(row.runtime == runtime for row in measured(bundle, step)):
        return ""
    reason = bundle.fact(NOT_RUN, {}).get(f"{step} {runtime}")
    command = _COMMANDS[step].format(bundle.path.name, runtime)
    return escape(reason) if reason else f"no record yet, <code>algm-deploy {escape(command)}</code> makes one"


# -------------------------------------------------------------------------------------------------------------- parity


def _parity(bundle: Bundle) -> Iterator[str]:
    records = bundle.section(PARITY)
    yield "<p>A chain of comparisons from the original network to each runtime's label maps. Each link can fail.</p>"
    if not records:
        yield _not_run(_reason(bundle, PARITY))
    for runtime, record in records.items():
        batches = ", ".join(map(str, record["batches"]))
        pictures = record.get("pictures", "pictures")
        yield f"<h3>{escape(runtime)}: {'passed' if record['passed'] else 'FAILED'}</h3>"
        yield html_table(
            *parity_table(record),
            f"{counted(record['images'], pictures)}, in batches of {batches}; device: {_device(record)}",
        )


# ------------------------------------------------------------------------------------------------------------ accuracy


def _accuracy(bundle: Bundle, evaluations: Sequence[Measured]) -> Iterator[str]:
    if not evaluations:
        yield _not_run(_reason(bundle, EVALUATION))
        return
    yield html_table(*runs_table(evaluations), "all evaluations of this bundle")
    yield _spread(bundle, evaluations)
    main, *others = evaluations
    yield html_table(*quality_table(main.record), f"by slice: {_about(main, bundle)}")
    classes = main.record["iou_percent_by_class"]
    yield _folded(f"By class: {_about(main, bundle)}", _class_bars(classes), is_open=len(classes) <= _MANY_CLASSES)
    for row in others:
        yield _folded(f"By slice: {_about(row, bundle)}", html_table(*quality_table(row.record)))
    for row in evaluations:
        for name, reason in row.record["failures"].items():
            yield f'<p class="bad">Not evaluated, {_about(row, bundle)}: {escape(name)}: {escape(reason)}</p>'


def _class_bars(classes: Mapping[str, float | None]) -> str:
    """IoU by class, drawn as bars and written out."""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="track"><i style="width:{value or 0:.2f}%"></i></td>'
        f'<td class="n">{shown(value, 2)}</td></tr>'
        for name, value in classes.items()
    )
    head = '<th>class</th><th></th><th class="n">IoU %</th>'
    return f'<table class="bars"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _spread(bundle: Bundle, evaluations: Sequence[Measured]) -> str:
    """How far runtimes differ in mIoU at the same thresholds on the same pictures."""
    groups: dict[tuple[Any, ...], list[Measured]] = {}
    for row in evaluations:
        key = (row.artifact, *(row.record[name] for name in ("dataset", "split", "images", "labelled_pixels")))
        groups.setdefault(key, []).append(row)
    lines = []
    for rows in groups.values():
        values = [row.record["miou_percent"] for row in rows]
        if len(rows) > 1 and None not in values:
            gate, spread = bundle.recipe.gates.miou_drop_points, max(values) - min(values)
            verdict = "within" if spread <= gate else "beyond"
            names = " and ".join(row.runtime for row in rows)
            lines.append(
                f"<p>{escape(names)} differ by {spread:.3f} points, {verdict} the {gate:g} that the recipe allows.</p>"
            )
    return "".join(lines)


# --------------------------------------------------------------------------------------------------- what merging costs


def _cost(bundle: Bundle, evaluations: Sequence[Measured]) -> Iterator[str]:
    groups = [group for group in comparable(evaluations) if len({row.artifact.plan for row in group}) > 1]
    if not groups:
        command = f"algm-deploy evaluate {bundle.path.name} --data FOLDER"
        yield _not_run(
            "it takes two evaluations on the same pictures that differ in merging: "
            f"<code>{escape(command)}</code>, then again with <code>--dense</code> or another <code>--tau</code>"
        )
    for group in groups:
        yield f"<h3>{escape(_group_title(group))}</h3>"
        yield html_table(*cost_table(group), "differences to the dense network in brackets, in points")
        if len({name for row in group for name in row.record["slices"]}) > 1:
            yield html_table(*slice_table(group), "by slice: losses hide in slices")
        yield _folded("By class", html_table(*class_table(group)))


def _group_title(group: Sequence[Measured]) -> str:
    record, bundles = group[0].record, " and ".join(dict.fromkeys(row.bundle for row in group))
    where = f"{dataset_name(record)}, {counted(record['images'], 'images')}"
    return f"{bundles}: {where}, {group[0].runtime}, {group[0].artifact.precision}"


# --------------------------------------------------------------------------------------------------------------- speed


def _speed(bundle: Bundle, evaluations: Sequence[Measured], speeds: Sequence[Measured]) -> Iterator[str]:
    if not speeds:
        yield _not_run(_reason(bundle, SPEED))
        return
    yield html_table(*speed_table(speeds), "measured speed; GMACs are multiply-adds in 10⁹ of a window")
    if pairs := joined(evaluations, speeds):
        yield html_table(*joined_table(pairs), "accuracy and speed of the same weights, plan and precision")
    series = list(_latency_series(bundle, speeds))
    if not all(one.hollow for one in series):
        plot = scatter("tokens after the last merge", "p50 ms", series)
        yield _figure(plot, "latency against tokens: each point is a picture, at its median; dense for all of them")
    for title, run in _runs(speeds).items():
        notes = "".join(f"<li>{escape(note)}</li>" for note in speed_notes(run))
        yield _folded(f"How it was timed: {escape(title)}", f"<ul>{notes}</ul>")


def _latency_series(bundle: Bundle, speeds: Sequence[Measured]) -> Iterator[Series]:
    """Pictures by tokens and latency, and the dense network of the same run as one point."""
    patches = bundle.recipe.network.grid[0] * bundle.recipe.network.grid[1]
    for row in speeds:
        record, where = row.record, f"{row.runtime}, {row.bundle}"
        if not record["stable"]:
            continue
        if by_picture := record.get("by_picture"):
            counts = [value for name, value in by_picture.items() if name.startswith("tokens_after_")][-1:]
            latencies = by_picture.get("latency_ms_p50", [])
            if [len(values) for values in counts] != [len(latencies)]:
                raise BundleError(
                    f"{bundle.path}: expected as many token counts as latencies in the speed record of {where}, "
                    "it was edited: run bench again"
                )
            points = zip(counts[0], latencies, strict=True)
            yield Series(f"merged, {where}", tuple((x, y, "") for x, y in points))
        elif record["variant"] == "dense" and "latency_ms_p50" in record:
            yield Series(f"dense, {where}", ((patches, record["latency_ms_p50"], "dense"),), hollow=True)


def _runs(speeds: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Speed records by the run that timed them, where they hold its conditions."""
    runs: dict[str, list[Measured]] = {}
    for row in speeds:
        record = row.record
        if record.keys() >= CONDITIONS:
            title = f"{row.bundle}, {row.runtime}, {record['protocol']}, batch {record['batch']}"
            runs.setdefault(title, []).append(row)
    return runs


# -------------------------------------------------------------------------------------------------------------- tokens


def _tokens(bundle: Bundle, evaluations: Sequence[Measured]) -> Iterator[str]:
    if not bundle.recipe.merging.layers:
        yield _not_run("this bundle merges nothing")
        return
    if not evaluations:
        yield _not_run(_reason(bundle, EVALUATION))
    drawn: dict[tuple[Any, ...], str] = {}
    for row in evaluations:
        histograms = row.record["token_histograms"]
        means = {merge: row.record[f"tokens_after_{merge}_mean"] for merge in merges_of(row.record)}
        windows = histograms["windows_by_merge"]
        counts = {merge: windows[merge] for merge in shown_merges([*windows])}
        plot = histogram(histograms["token_edges"], counts, means)
        figure = _figure(plot, f"{_about(row, bundle)}: {counted(row.record['windows'], 'windows')}")
        if row.artifact.plan.layers:
            drawn.setdefault((row.artifact.plan, row.record["dataset"]), figure)
    yield f'<div class="plots">{"".join(drawn.values())}</div>'


# ----------------------------------------------------------------------------------------------------------- trade-off


def _trade_off(
    bundle: Bundle, evaluations: Sequence[Measured], speeds: Sequence[Measured], published: Sequence[Published]
) -> Iterator[str]:
    known = [row for row in evaluations if row.record["miou_percent"] is not None]
    counted = [row for row in known if row.record["gmacs_per_window_mean"] is not None]
    groups = [group for group in comparable(counted) if len({row.artifact.plan for row in group}) > 1]
    stable = [row for row in speeds if row.record.get("throughput_img_per_s") and row.record.get("stable") is not False]
    pairs = joined(known, stable)
    plots = []
    if groups:
        series = [*map(_cost_series, groups), *_published_series(bundle, groups, published)]
        plot = scatter("GMACs per window", "mIoU %", series)
        plots.append(_figure(plot, "accuracy against arithmetic (multiply-adds in 10⁹); each point is a threshold"))
    if len({a.artifact.plan for a, _ in pairs}) > 1:
        plot = scatter("img/s", "mIoU %", list(_speed_series(pairs)))
        plots.append(_figure(plot, "accuracy against throughput"))
    yield f'<div class="plots">{"".join(plots)}</div>'
    if not plots:
        yield _not_run(
            "one point makes no trade-off: evaluate at several thresholds, or name a dense bundle beside this one"
        )


def _cost_series(group: Sequence[Measured]) -> Series:
    points = [
        (
            row.record["gmacs_per_window_mean"],
            row.record["miou_percent"],
            plan_name(row.artifact.plan, merged_plan(group)),
        )
        for row in group
    ]
    return Series(_group_title(group), tuple(points))


def _published_series(
    bundle: Bundle, groups: Sequence[Sequence[Measured]], published: Sequence[Published]
) -> Iterator[Series]:
    """Published points of the same network, where the measured ones are of the same data set."""
    rows = [row for row in published_beside(bundle.recipe, published) if row.implemented]
    points = [(row.gmacs, row.miou_percent, published_name(row)) for row in rows if row.gmacs and row.miou_percent]
    if points and all(group[0].record["dataset"] == bundle.recipe.protocol.dataset for group in groups):
        yield Series("published", tuple(points), hollow=True)


def _speed_series(pairs: Sequence[tuple[Measured, Measured]]) -> Iterator[Series]:
    plan = merged_plan([a for a, _ in pairs])
    by_kind: dict[str, list[tuple[float, float, str]]] = {}
    for a, s in pairs:
        kind = f"{s.runtime}, {s.record.get('protocol', UNKNOWN)}, {_device(s.record)}"
        point = (s.record["throughput_img_per_s"], a.record["miou_percent"], plan_name(a.artifact.plan, plan))
        by_kind.setdefault(kind, []).append(point)
    for kind, points in by_kind.items():
        yield Series(kind, tuple(points))


def _tuning(bundle: Bundle, gallery: Gallery | None) -> Iterator[tuple[str, str, Iterator[str]]]:
    """The section on tuning, where a bundle was tuned."""
    if bundle.section("tuning"):
        yield "tuning", "Tuning", tuning_section(bundle, gallery.at_thresholds if gallery else ())


# ------------------------------------------------------------------------------------------------------------- gallery


def _gallery(gallery: Gallery | None) -> Iterator[str]:
    if gallery is None:
        yield _not_run("no pictures were given, <code>--images</code> or <code>--data</code> adds them")
        return
    yield (
        f"<p>Computed by {escape(gallery.runtime)}. Each token has the mean colour of its patches; light lines "
        "surround patches that share a token. The window similarity was computed by PyTorch in fp32.</p>"
    )
    yield _legend(gallery)
    for example in gallery.examples:
        yield _example(example)


def _example(example: Example) -> str:
    figures = "".join(
        f'<figure><img src="{data_url(panel)}" alt="{escape(panel.title)}"><figcaption><b>{escape(panel.title)}</b> '
        f"{escape(panel.subtitle)}</figcaption></figure>"
        for panel in example.panels
    )
    return f'<h3>{escape(example.name)}</h3><div class="pictures">{figures}</div>'


def _legend(gallery: Gallery) -> str:
    entries = "".join(
        f'<li><span class="swatch" style="background:rgb{color}"></span>{escape(name)}</li>'
        for name, color in gallery.legend
    )
    return f'<ul class="legend">{entries}</ul>'


# ----------------------------------------------------------------------------------------------- published, environment


def _published(bundle: Bundle, evaluations: Sequence[Measured], published: Sequence[Published]) -> Iterator[str]:
    rows = published_beside(bundle.recipe, published)
    if not rows:
        network = bundle.recipe.network
        yield (
            f"<p>No published figures are known for a {escape(network.family)} of width {network.embed_dim} on "
            f"{escape(bundle.recipe.protocol.dataset)} at {network.image_size[1]} pixels.</p>"
        )
        return
    ours = [row for row in evaluations if row.record["dataset"] == bundle.recipe.protocol.dataset]
    yield html_table(*runs_table(ours), "measured") if ours else _not_run(_reason(bundle, EVALUATION))
    for source in dict.fromkeys(row.source for row in rows):
        header, lines = published_table([row for row in rows if row.source == source])
        yield html_table(header[:-1], [line[:-1] for line in lines], f"published: {source}")
    yield (
        "<p>GMACs are multiply-adds in 10⁹, which these sources call GFLOPs. "
        "Speeds of different devices do not compare.</p>"
    )


def _environment(bundles: Sequence[Bundle]) -> Iterator[str]:
    yield html_table(*environment_table(bundles[0].fact("environment")), "where the bundle was exported")
    if engines := bundles[0].section("engines"):
        yield html_table(*engine_table(engines), "engines as built; whether one was executed is said in the summary")
    for bundle in bundles:
        files = [
            (name, f"{entry.size_bytes / 1e6:.2f}", f"{entry.sha256[:12]}…")
            for name, entry in sorted(bundle.files.items())
        ]
        yield html_table(("file", "MB", "SHA-256"), files, f"files of {bundle.path.name}")


# --------------------------------------------------------------------------------------------------------------- parts


def _reason(bundle: Bundle, step: str) -> str:
    reasons = {name: bundle.fact(NOT_RUN, {}).get(f"{step} {name}") for name in _runtimes(bundle)}
    if known := [f"{escape(name)}: {escape(reason)}" for name, reason in reasons.items() if reason]:
        return "; ".join(known)
    command = _COMMANDS[step].format(bundle.path.name, "onnxruntime-cpu")
    return f"the bundle holds no record of it yet, <code>algm-deploy {escape(command)}</code> makes one"


def _not_run(reason: str) -> str:
    """`reason` is HTML."""
    return f'<p class="notrun"><b>not run</b>: {reason}</p>'


def _about(row: Measured, bundle: Bundle) -> str:
    record = row.record
    where = f"{dataset_name(record)}, {counted(record['images'], 'images')}"
    return escape(f"{where}, {row.runtime}, {_plan(row, bundle)}")


def _plan(row: Measured, bundle: Bundle) -> str:
    return plan_name(row.artifact.plan, plan_in_force(bundle.recipe.merging, {}))


def _device(record: Any) -> str:
    return str(record.get("device", "not recorded"))


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def _figure(drawing: str, caption: str) -> str:
    return f'<figure class="plotted">{drawing}<figcaption>{escape(caption)}</figcaption></figure>'


def _folded(title: str, content: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{title}</summary>{content}</details>"


def _state_class(value: str) -> str:
    return {"passed": ' class="good"', "FAILED": ' class="bad"', "not run": ' class="muted"'}.get(value, "")
