"""What vLLM's /metrics has of the states on disk. vLLM itself counts the tokens that were found there."""

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "read_bytes": "Bytes of states, keys and values that were read from disk",
    "written_bytes": "Bytes of states, keys and values that were written to disk",
    "loads": "Prompts that went on from states on disk, counted by every rank",
    "failed_loads": "Prompts whose states were found on disk and could not be read, counted by every rank",
}
DISK = "disk_bytes"
GAUGES = {DISK: "Bytes that the states of all models took in the folder after the last write"}


class StateStats(KVConnectorStats):
    """The counts of one step: `data` has those that are not zero."""

    def add(self, name: str, value: int):
        self.data[name] = self.data.get(name, 0) + value

    def reset(self):
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "StateStats":
        """Sums over ranks and steps; of the bytes on disk the last number."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class StateMetrics(KVConnectorPromMetrics):
    """`COUNTERS` and `GAUGES`, with "vllm:memmix_states_" in front of their names."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.metrics = {}
        for kind, rows in ((metric_types[Counter], COUNTERS), (metric_types[Gauge], GAUGES)):
            for name, text in rows.items():
                metric = kind(name=f"vllm:memmix_states_{name}", documentation=text, labelnames=labelnames)
                for engine, values in per_engine_labelvalues.items():
                    self.metrics[engine, name] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, int], engine_idx: int = 0):
        for name, value in transfer_stats_data.items():
            metric = self.metrics[engine_idx, name]
            (metric.set if name in GAUGES else metric.inc)(value)
