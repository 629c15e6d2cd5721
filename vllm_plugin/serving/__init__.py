"""Real vLLM engines in processes of their own, for the ``bench`` and ``verify`` commands."""
