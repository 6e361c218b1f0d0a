/* Copies between paged blocks and flat records in host memory, one call for all of them.
 *
 * copy.py says what is copied and how it is without this file; both move the same bytes. Long
 * fragments of a copy that no cache holds are stored past the caches: otherwise the processor reads
 * every line of the destination before it is overwritten, a third transfer beside the two that a
 * copy needs. Built against the limited API: one file serves every Python from 3.11 on.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__) /* every x86-64 */
#include <emmintrin.h>
#define HAVE_STREAM 1
#endif

#define LINE 64
#define AHEAD (8 * LINE)
#define THREADS_MAX 64

/* ------------------------------------------------------------------------ one fragment */

#ifdef HAVE_STREAM
/* Let the start of a source come near while another one is copied. Processors that guess what is
 * read next cannot guess this. What is fetched may lie behind the fragment: never a fault. */
static void fetch(const char *from) {
    for (int i = 0; i < AHEAD; i += LINE)
        _mm_prefetch(from + i, _MM_HINT_NTA);
}

/* Whole lines of the destination go past the caches; what is before and behind them does not. */
static void copy_streamed(char *to, const char *from, size_t length) {
    size_t head = -(uintptr_t)to & (LINE - 1);
    if (head > length)
        head = length;
    memcpy(to, from, head);
    to += head, from += head, length -= head;
    for (; length >= LINE; length -= LINE, to += LINE, from += LINE) {
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA);
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)from + 2);
        __m128i d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    memcpy(to, from, length);
}

/* Streamed stores are not ordered with what follows until this. */
static void settle(void) { _mm_sfence(); }
#else
static void fetch(const char *from) { (void)from; }
static void copy_streamed(char *to, const char *from, size_t length) { memcpy(to, from, length); }
static void settle(void) {}
#endif

/* ------------------------------------------------------------------------ all of them */

/* Fragment `f` of block `b` is at `base[f] + b * stride[f]`, and at `place[f]` in a record. */
struct copies {
    const int64_t *base, *stride, *length, *place; /* of fragments */
    const int64_t *ids, *offsets;                  /* of blocks and of their records */
    int64_t fragments, blocks;
    char *arena;
    int to_blocks;
    int64_t stream_from;
};

/* Single copies first .. end - 1, counted record by record. */
struct share {
    const struct copies *copies;
    int64_t first, end;
    pthread_t thread;
};

struct single {
    char *to;
    const char *from;
    int64_t length;
};

static struct single single_at(const struct copies *all, int64_t at) {
    int64_t block = at / all->fragments, fragment = at % all->fragments;
    uint64_t start = (uint64_t)all->base[fragment], stride = (uint64_t)all->stride[fragment];
    char *paged = (char *)(uintptr_t)(start + (uint64_t)all->ids[block] * stride);
    char *flat = all->arena + all->offsets[block] + all->place[fragment];
    return (struct single){.to = all->to_blocks ? paged : flat,
                           .from = all->to_blocks ? flat : paged,
                           .length = all->length[fragment]};
}

static void *copy_share(void *argument) {
    const struct share *share = argument;
    struct single one, next = {0};
    if (share->first < share->end)
        next = single_at(share->copies, share->first);
    for (int64_t i = share->first; i < share->end; i++) {
        int64_t stream_from = share->copies->stream_from;
        one = next;
        if (i + 1 < share->end)
            next = single_at(share->copies, i + 1);
        if (one.length < stream_from) {
            memcpy(one.to, one.from, (size_t)one.length);
        } else {
            fetch(next.from);
            copy_streamed(one.to, one.from, (size_t)one.length);
        }
    }
    settle();
    return NULL;
}

/* The first share in this thread, the others in threads that end before this returns. A thread that
 * cannot be had costs time only. Signals stay with the threads that Python knows. */
static void copy_all(const struct copies *all, int threads) {
    struct share shares[THREADS_MAX];
    int64_t total = all->fragments * all->blocks;
    int started[THREADS_MAX] = {0};
    sigset_t every, before;
    sigfillset(&every);
    for (int i = 0; i < threads; i++) {
        shares[i].copies = all;
        shares[i].first = total / threads * i + total % threads * i / threads;
        shares[i].end = total / threads * (i + 1) + total % threads * (i + 1) / threads;
    }
    if (threads > 1) {
        pthread_sigmask(SIG_SETMASK, &every, &before);
        for (int i = 1; i < threads; i++)
            started[i] = pthread_create(&shares[i].thread, NULL, copy_share, &shares[i]) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    for (int i = 0; i < threads; i++)
        if (!started[i])
            copy_share(&shares[i]);
    for (int i = 1; i < threads; i++)
        if (started[i])
            pthread_join(shares[i].thread, NULL);
}

/* ------------------------------------------------------------------------ Python */

/* The int64s of an array, kept until `view` is released. 1, or 0 with an error. */
static int int64s_of(PyObject *array, Py_buffer *view) {
    if (PyObject_GetBuffer(array, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
        return 0;
    if (view->itemsize == 8 && view->format != NULL &&
        (strcmp(view->format, "l") == 0 || strcmp(view->format, "q") == 0))
        return 1;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, "fragments, block ids and offsets are arrays of int64");
    return 0;
}

/* NULL, or what is wrong. Nothing outside the blocks and the arena is reached when it is NULL. */
static const char *refusal(const struct copies *all, int64_t num_blocks, int64_t arena_bytes,
                           int64_t record_bytes) {
    if (record_bytes < 0 || arena_bytes < 0 || (all->blocks && record_bytes > arena_bytes))
        return "no record fits into the arena";
    for (int64_t i = 0; i < all->fragments; i++)
        if (all->length[i] < 0 || all->place[i] < 0 || all->place[i] > record_bytes ||
            all->length[i] > record_bytes - all->place[i])
            return "a fragment lies outside the record";
    for (int64_t i = 0; i < all->blocks; i++) {
        if (all->ids[i] < 0 || all->ids[i] >= num_blocks)
            return "there is no such block";
        if (all->offsets[i] < 0 || all->offsets[i] > arena_bytes - record_bytes)
            return "a record lies outside the arena";
    }
    return NULL;
}

static PyObject *copy_blocks(PyObject *module, PyObject *args) {
    PyObject *fragments, *ids, *offsets;
    long long num_blocks, arena, arena_bytes, record_bytes, stream_from;
    int to_blocks, threads;
    Py_buffer views[3];
    int held = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OLOLLOLpLi:copy_blocks", &fragments, &num_blocks, &ids, &arena,
                          &arena_bytes, &offsets, &record_bytes, &to_blocks, &stream_from,
                          &threads))
        return NULL;
    PyObject *arrays[3] = {fragments, ids, offsets};
    while (held < 3 && int64s_of(arrays[held], &views[held]))
        held++;
    if (held == 3) {
        const int64_t *columns = views[0].buf;
        int64_t count = views[0].len / 32;
        struct copies all = {
            .base = columns,
            .stride = columns + count,
            .length = columns + 2 * count,
            .place = columns + 3 * count,
            .ids = views[1].buf,
            .offsets = views[2].buf,
            .fragments = count,
            .blocks = views[1].len / 8,
            .arena = (char *)(uintptr_t)arena,
            .to_blocks = to_blocks,
            .stream_from = stream_from,
        };
        const char *wrong = views[0].len % 32              ? "a fragment has four numbers"
                            : views[1].len != views[2].len ? "blocks and records do not pair up"
                            : threads < 1 || threads > THREADS_MAX
                                ? "there are 1 to 64 threads"
                                : refusal(&all, num_blocks, arena_bytes, record_bytes);
        if (wrong != NULL) {
            PyErr_SetString(PyExc_ValueError, wrong);
        } else if (count && all.blocks) {
            Py_BEGIN_ALLOW_THREADS
            copy_all(&all, threads);
            Py_END_ALLOW_THREADS
        }
    }
    while (held > 0)
        PyBuffer_Release(&views[--held]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_blocks", copy_blocks, METH_VARARGS,
     "copy_blocks(fragments, num_blocks, block_ids, arena, arena_bytes, offsets, record_bytes,\n"
     "            to_blocks, stream_from, threads)\n\n"
     "Blocks into records at `offsets` from the address `arena`, or back with `to_blocks`."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_host_copy",
    .m_doc = "The compiled copier.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__host_copy(void) { return PyModule_Create(&module); }
