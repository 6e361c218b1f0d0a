// Logs every write and sync to files below $POWER_LOG_DIR into $POWER_LOG, in order, so that states of
// the disk after a power cut can be built from it. Loaded with LD_PRELOAD.
//
// An event is a header, a path and, for a write, its bytes. A sync is two events, because only what was
// written before it began is durable when it has ended: 'B' at its begin, 'S' with the number of that
// event at its end.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PATH_BYTES 512
#define NOT_YET -2
#define NOWHERE -1

struct header {
    char kind;  // 'W' write, 'D' write that is durable by itself (O_DSYNC), 'B' sync begins,
                // 'S' sync has ended, 'T' the file has this size
    char zero;
    uint16_t path_bytes;
    uint32_t also_zero;
    uint64_t offset;  // of a write; the number of the 'B' event of an 'S'; the size of a 'T'
    uint64_t length;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = NOT_YET;
static const char *directory;
static uint64_t events;

static int watched(int fd, char *path) {
    if (log_fd == NOT_YET) {
        const char *log = getenv("POWER_LOG");
        directory = getenv("POWER_LOG_DIR");
        log_fd = !log || !directory
                     ? NOWHERE
                     : (int)syscall(SYS_openat, AT_FDCWD, log, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    }
    if (log_fd < 0) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_BYTES - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    if (length > 10 && !strcmp(path + length - 10, " (deleted)")) return 0;  // without a name no cut leaves it
    return !strncmp(path, directory, strlen(directory));
}

static void append(const void *bytes, size_t left) {
    const char *at = bytes;
    while (left) {
        ssize_t written = syscall(SYS_write, log_fd, at, left);
        if (written <= 0) _exit(99);
        at += written;
        left -= (size_t)written;
    }
}

static uint64_t record(char kind, const char *path, uint64_t offset, const struct iovec *parts, uint64_t length) {
    struct header header = {kind, 0, (uint16_t)strlen(path), 0, offset, length};
    pthread_mutex_lock(&lock);
    append(&header, sizeof header);
    append(path, header.path_bytes);
    for (uint64_t left = length; parts && left; parts++) {
        uint64_t part = parts->iov_len < left ? parts->iov_len : left;
        append(parts->iov_base, part);
        left -= part;
    }
    uint64_t number = ++events;
    pthread_mutex_unlock(&lock);
    return number;
}

static void record_write(int fd, const char *path, off_t offset, const struct iovec *parts, ssize_t length) {
    char kind = fcntl(fd, F_GETFL) & O_DSYNC ? 'D' : 'W';
    record(kind, path, (uint64_t)offset, parts, (uint64_t)length);
}

#define REAL(result, name, ...)                  \
    static result (*real)(__VA_ARGS__);          \
    char path[PATH_BYTES];                       \
    if (!real) real = dlsym(RTLD_NEXT, name)

#define PWRITE(name)                                                        \
    ssize_t name(int fd, const void *bytes, size_t length, off_t offset) {  \
        REAL(ssize_t, #name, int, const void *, size_t, off_t);             \
        ssize_t written = real(fd, bytes, length, offset);                  \
        struct iovec part = {(void *)bytes, length};                        \
        if (written > 0 && watched(fd, path)) record_write(fd, path, offset, &part, written); \
        return written;                                                     \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define PWRITEV(name)                                                          \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) { \
        REAL(ssize_t, #name, int, const struct iovec *, int, off_t);           \
        ssize_t written = real(fd, parts, count, offset);                      \
        if (written > 0 && watched(fd, path)) record_write(fd, path, offset, parts, written); \
        return written;                                                        \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define PWRITEV2(name)                                                                    \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) { \
        REAL(ssize_t, #name, int, const struct iovec *, int, off_t, int);                 \
        ssize_t written = real(fd, parts, count, offset, flags);                          \
        if (written > 0 && watched(fd, path)) record_write(fd, path, offset, parts, written); \
        return written;                                                                   \
    }
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    int ours = watched(fd, path);
    off_t offset = ours ? lseek(fd, 0, SEEK_CUR) : 0;
    ssize_t written = real(fd, parts, count);
    if (ours && written > 0) record_write(fd, path, offset, parts, written);
    return written;
}

ssize_t write(int fd, const void *bytes, size_t length) {
    REAL(ssize_t, "write", int, const void *, size_t);
    int ours = fd > 2 && watched(fd, path);
    off_t offset = ours ? lseek(fd, 0, SEEK_CUR) : 0;
    ssize_t written = real(fd, bytes, length);
    struct iovec part = {(void *)bytes, length};
    if (ours && written > 0) record_write(fd, path, offset, &part, written);
    return written;
}

#define SYNC(name)                                                 \
    int name(int fd) {                                             \
        REAL(int, #name, int);                                     \
        int ours = watched(fd, path);                              \
        uint64_t begin = ours ? record('B', path, 0, 0, 0) : 0;    \
        int result = real(fd);                                     \
        if (ours && !result) record('S', path, begin, 0, 0);       \
        return result;                                             \
    }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(name)                                                                \
    int name(int fd, off_t size) {                                                    \
        REAL(int, #name, int, off_t);                                                 \
        int result = real(fd, size);                                                  \
        if (!result && watched(fd, path)) record('T', path, (uint64_t)size, 0, 0);    \
        return result;                                                                \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define ALLOCATE(name)                                                                         \
    int name(int fd, off_t offset, off_t length) {                                             \
        REAL(int, #name, int, off_t, off_t);                                                   \
        int result = real(fd, offset, length);                                                 \
        if (!result && watched(fd, path)) record('T', path, (uint64_t)(offset + length), 0, 0); \
        return result;                                                                         \
    }
ALLOCATE(posix_fallocate)
ALLOCATE(posix_fallocate64)

// Writes that the kernel was handed together (io_submit) are logged when their end is told
// (io_getevents): by the same thread, which keeps what they point to until then.
#define PENDING_MAX 4096
static struct pending {
    unsigned long queue;
    struct iocb block;  // aio_fildes and what else is of use; taken when `queue` is not 0
} pending[PENDING_MAX];

static void submitted(unsigned long queue, struct iocb **blocks, long count) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < PENDING_MAX && count > 0; i++)
        if (!pending[i].queue) pending[i] = (struct pending){queue, *blocks[--count]};
    pthread_mutex_unlock(&lock);
    if (count > 0) _exit(98);
}

static struct iocb ended(unsigned long queue, uint64_t data) {
    struct iocb block = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < PENDING_MAX; i++)
        if (pending[i].queue == queue && pending[i].block.aio_data == data) {
            block = pending[i].block;
            pending[i].queue = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return block;
}

long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (!real) real = dlsym(RTLD_NEXT, "syscall");
    long given[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) given[i] = va_arg(list, long);
    va_end(list);
    long result = real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
    unsigned long queue = (unsigned long)given[0];
    if (number == SYS_io_submit && result > 0) submitted(queue, (struct iocb **)given[2], result);
    struct io_event *events = (struct io_event *)given[3];
    for (long i = 0; number == SYS_io_getevents && i < result; i++) {
        struct iocb block = ended(queue, events[i].data);
        char path[PATH_BYTES];
        int writes = block.aio_lio_opcode == IOCB_CMD_PWRITEV && events[i].res > 0;
        if (writes && watched((int)block.aio_fildes, path))
            record_write((int)block.aio_fildes, path, block.aio_offset,
                         (const struct iovec *)(uintptr_t)block.aio_buf, events[i].res);
    }
    return result;
}
