def doctor() -> None:
    """x"""
