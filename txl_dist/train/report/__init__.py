"""What a run says of itself: records, sinks, evaluation, samples."""
