/* Runs of a slab, many under way at a time, by one call of one thread.
 *
 * slab.py says what is written and read, and does the same run by run without this file. Linux takes
 * the runs of a call in one system call and tells of all their ends in another; the interpreter lock
 * is taken once for all of them. What the kernel does not take is done run by run. Built against the
 * limited API: one file serves every Python from 3.11 on.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/aio_abi.h>)
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#define HAVE_QUEUES 1
#endif
#endif

#define DEPTH 64          /* runs under way for one call */
#define PENDING INT64_MIN /* nothing is known of a run yet */

struct run {
    int64_t offset, moved; /* bytes, an errno below zero, or PENDING */
    Py_ssize_t first, views;
};

struct transfer {
    int fd, writes;
    struct run *runs;
    struct iovec *vectors; /* of the runs, one behind the other */
    Py_buffer *held;       /* what they point into */
    Py_ssize_t count, views;
};

/* ------------------------------------------------------------------------ moving */

static void move_one(const struct transfer *all, struct run *run) {
    const struct iovec *vectors = all->vectors + run->first;
    ssize_t moved;
    do
        moved = all->writes ? pwritev(all->fd, vectors, (int)run->views, (off_t)run->offset)
                            : preadv(all->fd, vectors, (int)run->views, (off_t)run->offset);
    while (moved < 0 && errno == EINTR);
    run->moved = moved < 0 ? -errno : moved;
}

#ifdef HAVE_QUEUES
/* The kernel's place for what a call has under way; no two calls share one. Giving one back takes
 * tens of milliseconds: they are kept for the next call, and end with the process. */
struct queue {
    aio_context_t context;
    struct queue *next;
};

static struct queue *idle; /* under the interpreter lock */
static pid_t owner;        /* who has those: a fork's child has none of them */

/* NULL: the kernel gives none. */
static struct queue *take_queue(void) {
    if (owner != getpid()) {
        idle = NULL;
        owner = getpid();
    }
    struct queue *queue = idle;
    if (queue != NULL) {
        idle = queue->next;
        return queue;
    }
    queue = PyMem_Calloc(1, sizeof *queue);
    if (queue != NULL && syscall(SYS_io_setup, (long)DEPTH, &queue->context) == 0)
        return queue;
    PyMem_Free(queue);
    return NULL;
}

static void keep_queue(struct queue *queue) {
    if (!queue->context) {
        PyMem_Free(queue);
        return;
    }
    queue->next = idle;
    idle = queue;
}

/* How many of the next runs the kernel has taken: up to `room`. -1 with errno: none. */
static long submit(struct queue *queue, const struct transfer *all, Py_ssize_t next, int room) {
    struct iocb blocks[DEPTH], *pointers[DEPTH];
    int batch = 0;
    memset(blocks, 0, sizeof blocks);
    for (; batch < room && next + batch < all->count; batch++) {
        const struct run *run = &all->runs[next + batch];
        struct iocb *block = pointers[batch] = &blocks[batch];
        block->aio_data = (uint64_t)(next + batch);
        block->aio_lio_opcode = all->writes ? IOCB_CMD_PWRITEV : IOCB_CMD_PREADV;
        block->aio_fildes = (uint32_t)all->fd;
        block->aio_buf = (uint64_t)(uintptr_t)(all->vectors + run->first);
        block->aio_nbytes = (uint64_t)run->views;
        block->aio_offset = run->offset;
    }
    return batch ? syscall(SYS_io_submit, queue->context, (long)batch, pointers) : 0;
}

/* How many have ended, at least `least`. -1: the queue is of no use any more, and nothing is under
 * way. */
static long reap(struct queue *queue, const struct transfer *all, int least) {
    struct io_event events[DEPTH];
    long ended;
    do
        ended = syscall(SYS_io_getevents, queue->context, (long)least, (long)DEPTH, events, NULL);
    while (ended < 0 && errno == EINTR);
    for (long i = 0; i < ended; i++)
        all->runs[events[i].data].moved = events[i].res;
    if (ended < 0) {
        syscall(SYS_io_destroy, queue->context); /* returns when nothing is under way */
        queue->context = 0;
    }
    return ended;
}

/* Leaves those pending that the kernel did not take, or did not tell of. None is under way any more.
 */
static void move_queued(struct queue *queue, const struct transfer *all) {
    Py_ssize_t next = 0;
    int flying = 0;
    while (next < all->count || flying) {
        long taken = submit(queue, all, next, DEPTH - flying);
        if (taken > 0) {
            next += taken, flying += (int)taken;
        } else if (taken < 0 && !flying) {
            next++;
            continue;
        }
        long ended = reap(queue, all, next < all->count ? 1 : flying);
        if (ended < 0)
            return;
        flying -= (int)ended;
    }
}
#else
struct queue;
static struct queue *take_queue(void) { return NULL; }
static void keep_queue(struct queue *queue) { (void)queue; }
static void move_queued(struct queue *queue, const struct transfer *all) {
    (void)queue, (void)all;
}
#endif

/* With the interpreter lock free while bytes move. */
static void move_all(const struct transfer *all) {
    struct queue *queue = all->count > 1 ? take_queue() : NULL;
    Py_BEGIN_ALLOW_THREADS
    if (queue != NULL)
        move_queued(queue, all);
    for (Py_ssize_t at = 0; at < all->count; at++)
        if (all->runs[at].moved == PENDING)
            move_one(all, &all->runs[at]);
    Py_END_ALLOW_THREADS
    if (queue != NULL)
        keep_queue(queue);
}

/* ------------------------------------------------------------------------ Python */

/* The parts of runs[at]: its offset, and a new reference to its views. 1, or 0 with an error. */
static int run_at(PyObject *runs, Py_ssize_t at, int64_t *offset, PyObject **views) {
    PyObject *run = PySequence_GetItem(runs, at);
    PyObject *number = run == NULL ? NULL : PySequence_GetItem(run, 0);
    *views = number == NULL ? NULL : PySequence_GetItem(run, 1);
    *offset = *views == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    Py_XDECREF(run);
    if (*views == NULL)
        return 0;
    if (!PyErr_Occurred())
        return 1;
    Py_DECREF(*views);
    return 0;
}

/* Room for the views of all runs. 1, or 0 with an error. */
static int make_room(PyObject *runs, struct transfer *all) {
    Py_ssize_t views = 0;
    all->runs = PyMem_Calloc((size_t)all->count + 1, sizeof *all->runs);
    for (Py_ssize_t at = 0; all->runs != NULL && at < all->count; at++) {
        struct run *run = &all->runs[at];
        PyObject *mine;
        if (!run_at(runs, at, &run->offset, &mine))
            return 0;
        run->views = PySequence_Size(mine);
        Py_DECREF(mine);
        if (run->views < 0)
            return 0;
        run->first = views;
        run->moved = PENDING;
        views += run->views;
    }
    all->vectors = PyMem_Calloc((size_t)views + 1, sizeof *all->vectors);
    all->held = PyMem_Calloc((size_t)views + 1, sizeof *all->held);
    if (all->runs != NULL && all->vectors != NULL && all->held != NULL)
        return 1;
    PyErr_NoMemory();
    return 0;
}

/* Hold the memory of all runs, and point to it. 1, or 0 with an error. */
static int hold(PyObject *runs, struct transfer *all) {
    int flags = all->writes ? PyBUF_SIMPLE : PyBUF_WRITABLE;
    for (Py_ssize_t at = 0; at < all->count; at++) {
        struct run *run = &all->runs[at];
        int64_t offset;
        PyObject *views;
        if (!run_at(runs, at, &offset, &views))
            return 0;
        for (Py_ssize_t i = 0; i < run->views; i++) {
            PyObject *view = PySequence_GetItem(views, i);
            Py_buffer *held = &all->held[all->views];
            int gone = view == NULL || PyObject_GetBuffer(view, held, flags) < 0;
            Py_XDECREF(view);
            if (gone) {
                Py_DECREF(views);
                return 0;
            }
            all->vectors[all->views++] = (struct iovec){held->buf, (size_t)held->len};
        }
        Py_DECREF(views);
    }
    return 1;
}

static PyObject *moved_by(const struct transfer *all) {
    PyObject *list = PyList_New(all->count);
    for (Py_ssize_t at = 0; list != NULL && at < all->count; at++) {
        PyObject *number = PyLong_FromLongLong(all->runs[at].moved);
        if (number == NULL || PyList_SetItem(list, at, number) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *transfer(PyObject *module, PyObject *args) {
    PyObject *runs, *moved = NULL;
    struct transfer all = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "iOp:transfer", &all.fd, &runs, &all.writes))
        return NULL;
    if ((all.count = PySequence_Size(runs)) < 0)
        return NULL;
    if (make_room(runs, &all) && hold(runs, &all)) {
        move_all(&all);
        moved = moved_by(&all);
    }
    while (all.views > 0)
        PyBuffer_Release(&all.held[--all.views]);
    PyMem_Free(all.held);
    PyMem_Free(all.vectors);
    PyMem_Free(all.runs);
    return moved;
}

static PyObject *has_queues(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    struct queue *queue = take_queue();
    if (queue == NULL)
        Py_RETURN_FALSE;
    keep_queue(queue);
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"transfer", transfer, METH_VARARGS,
     "transfer(fd, runs, writes)\n\n"
     "Write or read runs of (offset, views). Bytes moved of each, or an errno below zero."},
    {"has_queues", has_queues, METH_NOARGS,
     "has_queues()\n\nWhether the kernel takes many runs at a time."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_slab_io",
    .m_doc = "Runs of a slab, many under way at a time.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__slab_io(void) {
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddIntConstant(made, "DEPTH", DEPTH) < 0)
        Py_CLEAR(made);
    return made;
}
