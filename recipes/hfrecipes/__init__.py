"""What the recipes share: settings, tasks, training, statistics and reports."""
