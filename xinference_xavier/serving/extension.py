"""What `XINFERENCE_EXTENSIONS=xinference_xavier:extension` loads.

xinference calls the factory once in the API process, in the supervisor and in every worker, before
they serve anything. Then it calls the hooks, which must be synchronous and fast.
"""

from typing import Any

from xinference_xavier._version import __version__


class XavierExtension:
    """Implements version 1 of xinference's extension interface."""

    name = "xinference_xavier"
    api_version = 1

    def configure_api(self, context: Any) -> None:
        """Add our routes, metrics and pages; `context` is xinference's APIExtensionContext."""
        from xinference_xavier.serving import seam
        from xinference_xavier.serving.api import add_routes
        from xinference_xavier.serving.gateway import TrackerGateway
        from xinference_xavier.serving.metrics import add_metrics
        from xinference_xavier.serving.prefixes import Prefixes, Starting, add_prefix_routes
        from xinference_xavier.serving.routing import add_routing
        from xinference_xavier.serving.ui.routes import add_pages

        for feature in seam.Feature:
            seam.works(feature)  # or a warning says why not
        trackers = TrackerGateway(context.get_supervisor_ref)
        prefixes = Prefixes(trackers, context.get_supervisor_ref, seam.data_folder())
        add_routing(context, trackers.routers, prefixes)
        seam.add_middleware(context.app, Starting, prefixes=prefixes)
        add_routes(context, trackers)
        add_prefix_routes(context, prefixes)
        add_metrics(context, trackers)
        add_pages(context)

    def worker_metadata(self) -> dict[str, str]:
        return {"version": __version__}

    def filter_worker_resources(
        self, worker: dict[str, Any], workers: list[dict[str, Any]]
    ) -> list[int]:
        """Every device stays visible: sharing does not depend on placement."""
        return list(worker["gpu_devices"])
