import csv

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def rows_of(directory, tag):
    with (directory / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row[tag]]


def events_of(directory):
    events = EventAccumulator(
        str(directory), size_guidance=dict.fromkeys(["images", "tensors", "histograms", "scalars"], 0)
    )
    events.Reload()
    return events
