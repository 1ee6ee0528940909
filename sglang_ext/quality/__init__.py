"""Quality checks of long-context answers: tasks, documents, questions and their scoring."""
