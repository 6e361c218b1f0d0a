/* A stand-in for libcuda, for tests without a GPU. It includes NVIDIA's own cuda.h, so that the
   compiler checks every prototype that the ctypes binding claims. Device memory is host memory.

   Streams are as lazy as a real device may be: what is queued runs when somebody waits for it, in
   order, and after the events that the stream was told to wait for. A copy that should have waited
   and did not reads what lies there at that moment. Copies whose source may be read in any order
   read it at once. Not thread-safe beyond one lock around every call. */
#include <cuda.h>
#include <cudaTypedefs.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#undef cuMemcpyBatchAsync
#undef cuGetProcAddress

enum { OPS = 1 << 16, STREAMS = 64, EVENTS = 1024, RANGES = 64 };
typedef enum { COPY, WAIT } Kind;
typedef struct { Kind kind; void *dst; const void *src; void *snapshot; size_t n, stream, place; } Op;
typedef struct { Op *ops; size_t count, done; int alive; } Stream;
typedef struct { size_t stream, place; int recorded; } Event;
typedef struct { char *start; size_t size; } Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream streams[STREAMS];
static Event events[EVENTS];
static Range ranges[RANGES];
static size_t event_count, range_count;
static __thread int context;
static struct {
  size_t batches, copies, bytes, singles, registered, no_batch, unsupported, lockable, fail_copy, last_order;
} state;

static int crosses(const void *p, size_t n) {
  const char *a = p;
  for (size_t i = 0; i < range_count; ++i)
    if (a < ranges[i].start + ranges[i].size && ranges[i].start < a + n)
      return a < ranges[i].start || a + n > ranges[i].start + ranges[i].size;
  return 0;
}

static void run(size_t s, size_t until) {
  /* An event of a stream that is gone: all of it has run, and its number may be another's by now. */
  if (until > streams[s].count) until = streams[s].count;
  while (streams[s].done < until) {
    Op *op = &streams[s].ops[streams[s].done++];
    if (op->kind == WAIT) {
      run(op->stream, op->place);
    } else {
      memcpy(op->dst, op->snapshot ? op->snapshot : op->src, op->n);
      free(op->snapshot);
      op->snapshot = 0;
    }
  }
}

static void run_all(void) {
  for (size_t s = 1; s < STREAMS; ++s) run(s, streams[s].count);
}

/* Streams are handed out as 0x1000 + number: neither NULL nor one of the special handles. */
static size_t number(CUstream stream) { return (size_t)stream - 0x1000; }

static int known(CUstream stream) {
  return (size_t)stream > 0x1000 && number(stream) < STREAMS && streams[number(stream)].alive;
}

static CUresult queue(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream stream, int any_order) {
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!known(stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!dst || !src || !n || crosses((void *)dst, n) || crosses((void *)src, n)) return CUDA_ERROR_INVALID_VALUE;
  if (state.fail_copy && !--state.fail_copy) return CUDA_ERROR_ILLEGAL_ADDRESS;
  Stream *to = &streams[number(stream)];
  if (to->count == OPS) return CUDA_ERROR_OUT_OF_MEMORY;
  Op *op = &to->ops[to->count++];
  *op = (Op){.kind = COPY, .dst = (void *)dst, .src = (void *)src, .n = n};
  if (any_order) op->snapshot = memcpy(malloc(n), op->src, n);
  state.copies++, state.bytes += n;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI batch_v12080(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                     CUmemcpyAttributes *attrs, size_t *firsts, size_t n_attrs,
                                     size_t *fail, CUstream stream) {
  if (state.unsupported) return CUDA_ERROR_NOT_SUPPORTED;
  if (!count || n_attrs != 1 || firsts[0] != 0 || attrs[0].flags) return CUDA_ERROR_INVALID_VALUE;
  if (attrs[0].srcAccessOrder < 1 || attrs[0].srcAccessOrder > 3) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  CUresult result = CUDA_SUCCESS;
  state.batches++, state.last_order = attrs[0].srcAccessOrder;
  for (size_t i = 0; i < count && result == CUDA_SUCCESS; ++i) {
    result = queue(dsts[i], srcs[i], sizes[i], stream, attrs[0].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
    if (result != CUDA_SUCCESS) *fail = i;
  }
  pthread_mutex_unlock(&lock);
  return result;
}
/* The type is NVIDIA's: another prototype above does not compile with -Werror. */
static PFN_cuMemcpyBatchAsync_v12080 checked = batch_v12080;

CUresult CUDAAPI cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device) {
  *ctx = (CUcontext)(size_t)(0x77 + device);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx) {
  context = ctx == (CUcontext)0x77;
  return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **fn, int version, cuuint64_t flags,
                                     CUdriverProcAddressQueryResult *status) {
  int found = !strcmp(symbol, "cuMemcpyBatchAsync") && version >= 12080 && version < 13000 && !state.no_batch && !flags;
  *fn = found ? (void *)checked : 0;
  if (status) *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream stream) {
  pthread_mutex_lock(&lock);
  state.singles++;
  CUresult result = queue(dst, src, n, stream, 0);
  pthread_mutex_unlock(&lock);
  return result;
}
CUresult CUDAAPI cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if ((size_t)p % 4096 || !n || flags != CU_MEMHOSTREGISTER_PORTABLE || range_count == RANGES) return CUDA_ERROR_INVALID_VALUE;
  if (state.registered + n > state.lockable) return CUDA_ERROR_OUT_OF_MEMORY;
  ranges[range_count++] = (Range){p, n};
  state.registered += n;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemHostUnregister(void *p) {
  CUresult result = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < range_count && result; ++i)
    if (ranges[i].start == p) {
      run_all();
      state.registered -= ranges[i].size;
      ranges[i] = ranges[--range_count];
      result = CUDA_SUCCESS;
    }
  pthread_mutex_unlock(&lock);
  return result;
}
CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags != CU_STREAM_NON_BLOCKING || priority > 0) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  for (size_t s = 1; s < STREAMS && result; ++s)
    if (!streams[s].alive) {
      streams[s] = (Stream){.ops = malloc(OPS * sizeof(Op)), .alive = 1};
      *stream = (CUstream)(0x1000 + s);
      result = CUDA_SUCCESS;
    }
  pthread_mutex_unlock(&lock);
  return result;
}
CUresult CUDAAPI cuStreamDestroy_v2(CUstream stream) {
  if (!known(stream)) return CUDA_ERROR_INVALID_HANDLE;
  Stream *gone = &streams[number(stream)];
  pthread_mutex_lock(&lock);
  run(number(stream), gone->count);
  free(gone->ops);
  *gone = (Stream){0};
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
  if (!known(stream)) return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&lock);
  run(number(stream), streams[number(stream)].count);
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuEventCreate(CUevent *event, unsigned flags) {
  if (flags != CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  events[event_count % EVENTS] = (Event){0};
  *event = (CUevent)(0x9000 + event_count++ % EVENTS);
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuEventDestroy_v2(CUevent event) { return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }
CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
  if (!known(stream)) return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&lock);
  events[(size_t)event - 0x9000] = (Event){number(stream), streams[number(stream)].count, 1};
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  if (!known(stream) || flags) return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&lock);
  Event *of = &events[(size_t)event - 0x9000];
  Stream *to = &streams[number(stream)];
  if (of->recorded) to->ops[to->count++] = (Op){.kind = WAIT, .stream = of->stream, .place = of->place};
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuGetErrorName(CUresult code, const char **name) {
  *name = code == CUDA_ERROR_OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == CUDA_ERROR_INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : code == CUDA_ERROR_INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"
                                               : 0;
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* -- for the tests ------------------------------------------------------------------------------ */

void stand_in_reset(size_t no_batch, size_t unsupported, size_t lockable, size_t fail_copy) {
  run_all();
  for (size_t s = 1; s < STREAMS; ++s)
    if (streams[s].alive) free(streams[s].ops), streams[s] = (Stream){0};
  range_count = event_count = 0;
  memset(&state, 0, sizeof state);
  state.no_batch = no_batch, state.unsupported = unsupported, state.lockable = lockable, state.fail_copy = fail_copy;
  context = 0;
}
void stand_in_state(size_t *out) { memcpy(out, &state, sizeof state); }
/* sizeof and offsets of CUmemcpyAttributes */
void stand_in_attributes(size_t *out) {
  out[0] = sizeof(CUmemcpyAttributes), out[1] = __builtin_offsetof(CUmemcpyAttributes, srcLocHint);
  out[2] = __builtin_offsetof(CUmemcpyAttributes, dstLocHint), out[3] = __builtin_offsetof(CUmemcpyAttributes, flags);
}
