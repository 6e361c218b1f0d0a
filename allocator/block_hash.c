/* Names of token blocks: SHA-256 over canonical CBOR, one call for a whole prompt.
 *
 * hashing.py says what is hashed and how it is without this file; both yield the same names. Tokens
 * are encoded straight from Python's ints, or from an array of int64, into one buffer with the
 * padding that SHA-256 wants, so that a block costs its digest and little more. Built against the
 * limited API: one file serves every Python from 3.11 on.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_SHA_NI 1
#include <cpuid.h>
#include <immintrin.h>
#endif

#define NAME_BYTES 32
#define SHA_BLOCK 64

/* ------------------------------------------------------------------------ SHA-256 (FIPS 180-4) */

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static const uint32_t START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

typedef void (*compress_fn)(uint32_t state[8], const uint8_t *data, size_t blocks);

static uint32_t rotated(uint32_t word, int by) { return word >> by | word << (32 - by); }

static uint32_t read_u32(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* The low `size` bytes of a value, big-endian; `size` is a constant wherever it matters. */
static uint8_t *put(uint8_t *at, uint64_t value, int size) {
    for (int i = size - 1; i >= 0; i--)
        *at++ = (uint8_t)(value >> 8 * i);
    return at;
}

/* One round. Its callers rotate the names instead of the values. */
#define ROUND(a, b, c, d, e, f, g, h, i)                                                           \
    do {                                                                                           \
        uint32_t t = (h) + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) +                     \
                     ((g) ^ ((e) & ((f) ^ (g)))) + K[i] + w[i];                                    \
        (d) += t;                                                                                  \
        (h) = t + (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) +                              \
              (((a) & (b)) | ((c) & ((a) | (b))));                                                 \
    } while (0)

static void compress_portable(uint32_t state[8], const uint8_t *data, size_t blocks) {
    for (; blocks; blocks--, data += SHA_BLOCK) {
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7], w[64];
        for (int i = 0; i < 16; i++)
            w[i] = read_u32(data + 4 * i);
        for (int i = 16; i < 64; i++) {
            uint32_t x = w[i - 15], y = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] + (rotated(x, 7) ^ rotated(x, 18) ^ x >> 3) +
                   (rotated(y, 17) ^ rotated(y, 19) ^ y >> 10);
        }
        for (int i = 0; i < 64; i += 8) {
            ROUND(a, b, c, d, e, f, g, h, i);
            ROUND(h, a, b, c, d, e, f, g, i + 1);
            ROUND(g, h, a, b, c, d, e, f, i + 2);
            ROUND(f, g, h, a, b, c, d, e, i + 3);
            ROUND(e, f, g, h, a, b, c, d, i + 4);
            ROUND(d, e, f, g, h, a, b, c, i + 5);
            ROUND(c, d, e, f, g, h, a, b, i + 6);
            ROUND(b, c, d, e, f, g, h, a, i + 7);
        }
        uint32_t found[8] = {a, b, c, d, e, f, g, h};
        for (int i = 0; i < 8; i++)
            state[i] += found[i];
    }
}

#ifdef HAVE_SHA_NI
/* The instructions keep the state as the words ABEF and CDGH, highest first. */
__attribute__((target("sha,sse4.1"))) static void
compress_ni(uint32_t state[8], const uint8_t *data, size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1);
    __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
    for (; blocks; blocks--, data += SHA_BLOCK) {
        __m128i before_abef = abef, before_cdgh = cdgh, w[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)data + i), big_endian);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i now = w[i & 3], last = w[(i + 3) & 3];
            __m128i sum = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)(K + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
            if (i < 12) { /* the words of four rounds later */
                __m128i next = _mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) & 3]),
                                             _mm_alignr_epi8(last, w[(i + 2) & 3], 4));
                w[i & 3] = _mm_sha256msg2_epu32(next, last);
            }
        }
        abef = _mm_add_epi32(abef, before_abef);
        cdgh = _mm_add_epi32(cdgh, before_cdgh);
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static int has_sha_ni(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 29);
}
#endif

static compress_fn fastest = compress_portable;

/* Digest of `data[0 .. length)`. The buffer goes on for SHA_BLOCK + 9 bytes, for the padding. */
static void digest(compress_fn compress, uint8_t *data, size_t length, uint8_t name[NAME_BYTES]) {
    size_t blocks = (length + 8) / SHA_BLOCK + 1;
    uint32_t state[8];
    memset(data + length, 0, blocks * SHA_BLOCK - length);
    data[length] = 0x80;
    put(data + blocks * SHA_BLOCK - 8, (uint64_t)length * 8, 8);
    memcpy(state, START, sizeof state);
    compress(state, data, blocks);
    for (int i = 0; i < 8; i++)
        put(name + 4 * i, state[i], 4);
}

/* ------------------------------------------------------------------------ CBOR (RFC 8949) */

/* The shortest head of major type `major` (already shifted). May write 9 bytes. */
static inline uint8_t *put_head(uint8_t *at, uint8_t major, uint64_t value) {
    if (value < 24) {
        *at++ = major | (uint8_t)value;
        return at;
    }
    if (value <= 0xffffffff) {
        /* Which of 1, 2 and 4 bytes is no branch: the widths of token ids cannot be predicted. */
        int code = (value > 0xff) + (value > 0xffff), size = 1 << code;
        *at = major | (uint8_t)(24 + code);
        put(at + 1, value << (32 - 8 * size), 4);
        return at + 1 + size;
    }
    *at++ = major | 27;
    return put(at, value, 8);
}

static inline uint8_t *put_int(uint8_t *at, int64_t value) {
    return value < 0 ? put_head(at, 1 << 5, ~(uint64_t)value) : put_head(at, 0, (uint64_t)value);
}

/* ------------------------------------------------------------------------ the chain */

enum source { LIST, TUPLE, ARRAY };

/* The token ids, wherever they are. */
struct tokens {
    enum source source;
    PyObject *items;
    const int64_t *values;
    Py_ssize_t length;
};

/* 1 and the value; 0 for what is no int or is wider, for Python to judge; -1 on error. */
static inline int token_at(const struct tokens *tokens, Py_ssize_t at, int64_t *value) {
    if (tokens->source == ARRAY) {
        *value = tokens->values[at];
        return 1;
    }
    PyObject *item = tokens->source == LIST ? PyList_GetItem(tokens->items, at)
                                            : PyTuple_GetItem(tokens->items, at);
    int overflow;
    if (item == NULL)
        return -1;
    if (!PyLong_CheckExact(item)) /* a bool is an int to C, and encodes otherwise */
        return 0;
    *value = PyLong_AsLongLongAndOverflow(item, &overflow);
    return overflow == 0;
}

/* Fills `names`. 1, or 0 and -1 as `token_at` has them. `buffer` has room for a block. */
static int hash_run(const struct tokens *tokens, Py_ssize_t block_size, Py_ssize_t first,
                    Py_ssize_t end, const uint8_t parent[NAME_BYTES], PyObject *suffixes,
                    compress_fn compress, uint8_t *buffer, PyObject *names) {
    uint8_t *parent_at = put_head(put_head(buffer, 4 << 5, 3), 2 << 5, NAME_BYTES);
    uint8_t *tokens_at = put_head(parent_at + NAME_BYTES, 4 << 5, (uint64_t)block_size);
    int each = PyList_Check(suffixes);
    memcpy(parent_at, parent, NAME_BYTES);
    for (Py_ssize_t block = first; block < end; block++) {
        uint8_t *at = tokens_at, name[NAME_BYTES];
        for (Py_ssize_t i = block * block_size; i < (block + 1) * block_size; i++) {
            int64_t value = 0;
            int found = token_at(tokens, i, &value);
            if (found != 1)
                return found;
            at = put_int(at, value);
        }
        PyObject *suffix = each ? PyList_GetItem(suffixes, block - first) : suffixes;
        if (suffix == NULL)
            return -1;
        size_t size = (size_t)PyBytes_Size(suffix);
        memcpy(at, PyBytes_AsString(suffix), size);
        digest(compress, buffer, (size_t)(at - buffer) + size, name);
        PyObject *found = PyBytes_FromStringAndSize((const char *)name, NAME_BYTES);
        if (found == NULL || PyList_SetItem(names, block - first, found) < 0)
            return -1;
        memcpy(parent_at, name, NAME_BYTES);
    }
    return 1;
}

/* The longest suffix, or -1 with an error for what is neither bytes nor one bytes a block. */
static Py_ssize_t longest_suffix(PyObject *suffixes, Py_ssize_t blocks) {
    Py_ssize_t longest = 0;
    if (PyBytes_Check(suffixes))
        return PyBytes_Size(suffixes);
    if (!PyList_Check(suffixes) || PyList_Size(suffixes) != blocks) {
        PyErr_SetString(PyExc_TypeError, "suffixes are bytes, or a list of bytes for each block");
        return -1;
    }
    for (Py_ssize_t i = 0; i < blocks; i++) {
        PyObject *suffix = PyList_GetItem(suffixes, i);
        if (suffix == NULL || !PyBytes_Check(suffix)) {
            PyErr_SetString(PyExc_TypeError, "a suffix is bytes");
            return -1;
        }
        if (PyBytes_Size(suffix) > longest)
            longest = PyBytes_Size(suffix);
    }
    return longest;
}

/* Where the tokens are. 1, or -1 with an error. An array keeps `view` until it is released. */
static int find_tokens(PyObject *token_ids, struct tokens *tokens, Py_buffer *view) {
    tokens->items = token_ids;
    if (PyList_CheckExact(token_ids) || PyTuple_CheckExact(token_ids)) {
        tokens->source = PyList_CheckExact(token_ids) ? LIST : TUPLE;
        tokens->length = PySequence_Size(token_ids);
        return 1;
    }
    if (PyObject_GetBuffer(token_ids, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    int is_int64 = view->ndim == 1 && view->itemsize == 8 && view->format != NULL &&
                   (strcmp(view->format, "l") == 0 || strcmp(view->format, "q") == 0);
    if (!is_int64) {
        PyErr_SetString(PyExc_TypeError, "an array of token ids is of int64, in one dimension");
        PyBuffer_Release(view);
        return -1;
    }
    tokens->source = ARRAY;
    tokens->values = view->buf;
    tokens->length = view->len / 8;
    return 1;
}

static PyObject *hash_blocks(PyObject *module, PyObject *args) {
    PyObject *token_ids, *suffixes, *names = NULL;
    Py_ssize_t block_size, first, end, parent_bytes, suffix_bytes;
    const char *parent;
    int portable = 0, done = -1;
    struct tokens tokens = {LIST, NULL, NULL, 0};
    Py_buffer view = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "Onnny#O|p:hash_blocks", &token_ids, &block_size, &first, &end,
                          &parent, &parent_bytes, &suffixes, &portable))
        return NULL;
    if (find_tokens(token_ids, &tokens, &view) < 0)
        return NULL;
    if (block_size < 1 || first < 0 || first > end || end > tokens.length / block_size ||
        parent_bytes != NAME_BYTES) {
        PyErr_SetString(PyExc_ValueError, "no such blocks, or a parent that is not 32 bytes");
        goto released;
    }
    if ((suffix_bytes = longest_suffix(suffixes, end - first)) < 0)
        goto released;
    /* Heads, parent, tokens of up to 9 bytes and 4 written ahead, suffix, padding. */
    uint8_t *buffer = block_size > (PY_SSIZE_T_MAX - suffix_bytes) / 16
                          ? NULL
                          : PyMem_Malloc(9 * (size_t)block_size + (size_t)suffix_bytes + 192);
    if (buffer == NULL) {
        PyErr_NoMemory();
        goto released;
    }
    if ((names = PyList_New(end - first)) != NULL)
        done = hash_run(&tokens, block_size, first, end, (const uint8_t *)parent, suffixes,
                        portable ? compress_portable : fastest, buffer, names);
    PyMem_Free(buffer);
released:
    if (tokens.source == ARRAY)
        PyBuffer_Release(&view);
    if (done == 1)
        return names;
    Py_XDECREF(names);
    if (done == 0)
        Py_RETURN_NONE;
    return NULL;
}

static PyMethodDef methods[] = {
    {"hash_blocks", hash_blocks, METH_VARARGS,
     "hash_blocks(token_ids, block_size, first, end, parent, suffixes, portable=False)\n\n"
     "Names of blocks first .. end - 1, or None when a token id is no int of 64 bits."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_block_hash",
    .m_doc = "The compiled hasher.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__block_hash(void) {
#ifdef HAVE_SHA_NI
    if (has_sha_ni())
        fastest = compress_ni;
#endif
    return PyModule_Create(&module);
}
