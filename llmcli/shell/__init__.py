"""What commands share: options, prompts, files, output, progress, and how a run ends."""
