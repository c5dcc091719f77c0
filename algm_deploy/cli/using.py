"""Commands that use a bundle: predict, serve, report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from algm_deploy.cli import arguments, proving
from algm_deploy.cli.saying import note, output, say
from algm_deploy.errors import ImageError, RuntimeUnavailableError
from algm_deploy.runners.registry import TRITON_BACKENDS


def predict_flags(command: arguments.Parser) -> None:
    """Flags of predict."""
    arguments.bundle(command)
    command.add_argument(
        "images",
        type=arguments.path,
        nargs="+",
        metavar="IMAGE",
        help="photos, videos, or folders of them; with --ray photos, their folders, lists (.txt) and tables (.parquet)",
    )
    command.add_argument(
        "-o", "--output", type=arguments.path, default=Path("predictions"), help="folder for the pictures (predictions)"
    )
    command.add_argument(
        "--frames",
        choices=("overlay", "labels"),
        default="overlay",
        help="of a video: a video with the classes over it (default), or a label map a frame as PNG",
    )
    arguments.runtime(command)
    arguments.device(command)
    arguments.thresholds(command)
    arguments.ray(command)
    command.add_argument(
        "--format", choices=("png", "parquet"), help="with --ray: a label map a file (default), or tables of them"
    )


def predict(options: argparse.Namespace) -> int:
    """Label map, overlay and merged-token pictures of photos; overlays or label maps of videos."""
    arguments.check_ray(options, "format")
    return _predict_on_ray(options) if options.ray else _predict_here(options)


def _predict_on_ray(options: argparse.Namespace) -> int:
    """Label maps alone, of as many photos as there are."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.fleet.cluster import connected
    from algm_deploy.fleet.predicting import FAILURES, predict
    from algm_deploy.wording import first_few

    bundle = Bundle.open(options.bundle)
    with connected(options.ray, options.workers) as cluster:
        found = predict(
            cluster,
            bundle,
            options.images,
            options.output,
            options.runtime,
            device=options.device,
            format=options.format or "png",
            progress=not options.quiet,
            **arguments.given_thresholds(options),
        )
    say(str(options.output))
    note(options, f"{found.done} label maps were made, {found.kept} were there, {len(found.failures)} failed")
    if found.failures:
        raise ImageError(
            f"{len(found.failures)} pictures have no label map, {options.output / FAILURES} lists them all: "
            f"{first_few([f'{name}: {why}' for name, why in found.failures.items()])}"
        )
    return 0


def _predict_here(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from algm_deploy.bundle.store import Bundle
    from algm_deploy.pictures.sources import find_sources, is_video
    from algm_deploy.predictor import Predictor
    from algm_deploy.report.pictures import PictureWriter

    sources = find_sources(options.images)
    failures: list[str] = []
    thresholds = arguments.given_thresholds(options)
    bundle = Bundle.open(options.bundle)
    runtime = arguments.runtime_of(options, bundle)
    with Predictor(bundle, runtime, device=options.device, **thresholds) as predictor:
        writer = PictureWriter(predictor, options.output)
        quiet = True if options.quiet or len(sources) == 1 else None
        for source in tqdm(sources, "predict", unit="file", disable=quiet):
            try:
                written = writer.write_video(source, options.frames) if is_video(source) else writer.write(source)
            except ImageError as error:
                failures.append(str(error))
                continue
            with output():
                for path in written:
                    tqdm.write(str(path))
    _check_all_done(failures, len(sources), "predicted")
    return 0


def _check_all_done(failures: Sequence[str], files: int, done: str) -> None:
    """ImageError about the files that failed, when the others are done."""
    if failures:
        listed = "\n  ".join((f"{len(failures)} of {files} files could not be {done}:", *failures))
        raise ImageError(failures[0] if files == 1 else listed)


def serve_flags(command: arguments.Parser) -> None:
    """Flags of serve."""
    arguments.bundle(command)
    command.add_argument(
        "--host", type=arguments.word, default="127.0.0.1", help="address to listen on; default: this machine alone"
    )
    command.add_argument("--port", type=arguments.port, default=8080, help="0 takes a free one (default 8080)")
    command.add_argument("--name", type=arguments.word, help="model's name in addresses; default: the folder's name")
    arguments.runtime(command)
    arguments.device(command)
    arguments.thresholds(command)
    group = command.add_argument_group("batches and limits")
    group.add_argument(
        "--batch", type=arguments.positive, help="windows that go through the network at once; default: the bundle's"
    )
    arguments.waiting(group, "pictures may wait or run at a time; further ones are told to come again")
    group.add_argument(
        "--max-request",
        type=arguments.up_to(4096),
        default=32,
        metavar="MIB",
        help="largest body of a request (default 32)",
    )
    group.add_argument(
        "--warm-up",
        type=arguments.count,
        default=20,
        metavar="S",
        help="seconds at most in which CUDA graphs are captured before the server listens; with 0 they are captured "
        "when they are needed (default 20)",
    )
    group.add_argument(
        "--grace",
        type=arguments.count,
        default=30,
        metavar="S",
        help="seconds that requests may take once the server is told to stop (default 30)",
    )


def serve(options: argparse.Namespace) -> int:
    """A server for one bundle: Open Inference Protocol, metrics, and a page to drop a photo on."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.predictor import Predictor

    try:
        from algm_deploy.serving.app import Limits
        from algm_deploy.serving.server import Settings, server
    except ModuleNotFoundError as error:
        if str(error.name).startswith("algm_deploy"):
            raise
        raise RuntimeUnavailableError(
            f"expected the module {error.name} to serve with, found none: `pip install 'algm-deploy[serve]'`"
        ) from error
    limits = Limits(options.max_request << 20, options.max_megapixels * 1_000_000, options.queue)
    settings = Settings(
        options.host,
        options.port,
        options.name,
        options.wait / 1000,
        options.grace,
        options.warm_up,
        limits=limits,
    )
    bundle = Bundle.open(options.bundle)
    runtime = arguments.runtime_of(options, bundle)
    options.chosen = None  # told as soon as the server listens
    given = arguments.given_thresholds(options)

    def listening(address: str) -> None:
        note(options, f"{runtime} on {predictor.device_name}, batches of {predictor.batch}; Ctrl-C stops it")
        note(options, str(running.warmed))
        say(address, at_once=True)

    with (
        Predictor(bundle, runtime, device=options.device, batch=options.batch, **given) as predictor,
        server(predictor, settings, listening) as running,
    ):
        running.run()
    return 0


def serve_repository_flags(command: arguments.Parser) -> None:
    """Flags of serve-repository."""
    arguments.bundle(command)
    command.add_argument(
        "-o", "--output", type=arguments.path, required=True, metavar="REPOSITORY", help="folder to add the model to"
    )
    command.add_argument(
        "--backend",
        choices=TRITON_BACKENDS,
        default=TRITON_BACKENDS[0],
        help="Triton's: python takes photos, and thresholds with each; the others take windows, and their thresholds "
        "are fixed here (default python)",
    )
    command.add_argument("--name", type=arguments.word, help="model's name in addresses; default: the folder's name")
    arguments.runtime(command)
    command.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="on the server's machine; default: the runtime's usual one here",
    )
    arguments.thresholds(command)
    group = command.add_argument_group("batches and limits")
    group.add_argument(
        "--instances",
        type=arguments.up_to(64),
        default=1,
        help="networks that run on each GPU, or on the CPU (default 1)",
    )
    arguments.waiting(group, "requests may wait; further ones are refused")
    command.add_argument(
        "--seen-at",
        type=arguments.path,
        metavar="FOLDER",
        help="where the server finds REPOSITORY, such as /models in its container; default: where it is written",
    )


def serve_repository(options: argparse.Namespace) -> int:
    """A model for Triton Inference Server: the bundle, its configuration, warm-up and batching."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.serving.triton_repository import Settings, write_repository

    bundle = Bundle.open(options.bundle)
    settings = Settings(
        options.name or bundle.path.resolve().name,
        options.backend,
        options.runtime,
        options.device,
        options.instances,
        options.wait / 1000,
        options.queue,
        options.max_megapixels * 1_000_000,
        **arguments.given_thresholds(options),
        seen_at=options.seen_at,
    )
    say(str(write_repository(bundle, options.output, settings)))
    return 0


def report_flags(command: arguments.Parser) -> None:
    """Flags of report."""
    arguments.bundle(command)
    command.add_argument(
        "beside", type=arguments.path, nargs="*", metavar="OTHER", help="bundles to compare with, such as a dense one"
    )
    command.add_argument(
        "-o", "--output", type=arguments.path, default=Path("report.html"), help="file to write (report.html)"
    )
    arguments.runtime(command)
    arguments.images(command, "no pictures")
    arguments.dataset(command, required=False)
    command.add_argument(
        "--count", type=arguments.up_to(100), default=3, help="how many photos of the data set (default 3)"
    )


def report(options: argparse.Namespace) -> int:
    """One HTML page about a bundle."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.pictures.sources import find_images
    from algm_deploy.report.gallery import Photo, draw_gallery, labelled_photos
    from algm_deploy.report.page import write_report

    arguments.check_data(options)
    bundles = [Bundle.open(path) for path in (options.bundle, *options.beside)]
    photos = [Photo(path.name, path) for path in find_images(options.images)] if options.images else []
    if options.data:
        photos += labelled_photos(proving.dataset_of(bundles[0], options), options.count)
    gallery = None
    if photos:
        gallery = draw_gallery(bundles[0], arguments.runtime_of(options, bundles[0]), photos, not options.quiet)
    say(str(write_report(bundles, options.output, gallery if gallery and gallery.examples else None)))
    _check_all_done(gallery.failures if gallery else (), len(photos), "drawn")
    return 0
