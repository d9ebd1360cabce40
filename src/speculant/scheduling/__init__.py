"""Who feeds how much, and how long drafts are."""
