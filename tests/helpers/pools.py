from multiprocessing import get_context


def forking(modules):
    """Return a way to start processes fast: forks of a server that has imported the modules. For the CPU only."""
    if not modules:
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.one_thread", *modules])
    return context
