"""Calls on many threads at once, and what a thread sees of the others."""

import threading
from concurrent.futures import ThreadPoolExecutor

import minference
import numpy as np
import pytest


def problem(seed, tokens):
    random = np.random.default_rng(seed)
    return [random.standard_normal((1, tokens, heads, 32), np.float32) for heads in (4, 2, 2)]


def test_thirty_threads():
    start = threading.Barrier(30)

    def work(seed):
        tokens = 64 + 7 * seed
        tensors = problem(seed, tokens)
        start.wait()
        for _ in range(3):
            out = minference.attention(*tensors, "a_shape", n_init=2, n_local=50, threads=1 + seed % 2)
            stats = minference.last_stats()
            assert stats.causal_pairs == 4 * tokens * (tokens + 1) // 2  # of this thread's call
        return out

    with ThreadPoolExecutor(30) as pool:
        results = list(pool.map(work, range(30)))
    for seed, out in enumerate(results):
        want = minference.attention(*problem(seed, 64 + 7 * seed), "a_shape", n_init=2, n_local=50, threads=1)
        np.testing.assert_array_equal(out, want)


def test_other_threads_run_meanwhile():
    tensors = problem(0, 8192)
    running = threading.Event()
    seen = []

    def work():
        running.set()
        minference.attention(*tensors, "dense", threads=1)
        running.clear()

    worker = threading.Thread(target=work)
    worker.start()
    running.wait()
    while running.is_set():
        seen.append(1)
    worker.join()
    assert len(seen) > 100  # this thread held the interpreter while the kernels ran


def test_a_new_thread_has_no_stats():
    minference.attention(*problem(0, 64))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(minference.last_stats).result() is None
    assert minference.last_stats() is not None


def test_a_state_serves_one_call_at_a_time():
    state = minference.MethodState()
    start = threading.Barrier(2)

    def work(seed):
        refused = 0
        tensors = problem(seed, 1024)
        start.wait()
        for _ in range(100):
            try:
                minference.attention(*tensors, "vertical_slash", state=state, threads=1)
            except ValueError as error:
                assert "state is in use by a call on another thread" in str(error)
                refused += 1
        return refused

    with ThreadPoolExecutor(2) as pool:
        assert 0 < sum(pool.map(work, range(2))) < 200


@pytest.mark.parametrize("kind", [minference.Guard, minference.MethodState])
def test_objects_may_be_shared(kind):
    shared = kind()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: repr(shared), range(100))) == {repr(shared)}
