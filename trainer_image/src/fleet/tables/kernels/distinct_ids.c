/* Distinct ids by a stable radix sort with digits of 11 bits, lowest digit first. Digits in which all ids agree
   are skipped, so small ids take few passes. */

#include <stdint.h>

enum { DIGIT_BITS = 11, VALUES = 1 << DIGIT_BITS, DIGITS = 6 };

static const uint64_t SIGN = UINT64_C(1) << 63;

static unsigned digit_of(uint64_t key, int digit) { return (key >> (digit * DIGIT_BITS)) & (VALUES - 1); }

/* Sort keys, and the places that they come from, by one digit. */
static void sort_by(int digit, const uint64_t *keys, const uint32_t *places, int64_t num_keys,
                    uint64_t *sorted, uint32_t *their_places) {
    uint32_t ends[VALUES] = {0}, end = 0;
    for (int64_t each = 0; each < num_keys; each++)
        ends[digit_of(keys[each], digit)]++;
    for (int value = 0; value < VALUES; value++) {
        uint32_t begin = end;
        end += ends[value];
        ends[value] = begin;
    }
    for (int64_t each = 0; each < num_keys; each++) {
        uint32_t at = ends[digit_of(keys[each], digit)]++;
        sorted[at] = keys[each];
        their_places[at] = places[each];
    }
}

/* Return the number of distinct ids. `keys` and `places` have room for 2 * num_ids entries. */
int64_t fleet_distinct_ids(const int64_t *ids, int64_t num_ids, uint64_t *keys, uint32_t *places,
                           int64_t *distinct, int64_t *positions) {
    uint64_t *sorted = keys + num_ids, differ = 0;
    uint32_t *their_places = places + num_ids;
    for (int64_t each = 0; each < num_ids; each++) {
        keys[each] = (uint64_t)ids[each] ^ SIGN; /* negative ids sort first */
        places[each] = (uint32_t)each;
        differ |= keys[each] ^ keys[0];
    }
    for (int digit = 0; digit < DIGITS; digit++) {
        if (!digit_of(differ, digit))
            continue;
        sort_by(digit, keys, places, num_ids, sorted, their_places);
        uint64_t *other_keys = keys;
        uint32_t *other_places = places;
        keys = sorted, sorted = other_keys;
        places = their_places, their_places = other_places;
    }
    int64_t number = 0;
    for (int64_t each = 0; each < num_ids; each++) {
        if (!each || keys[each] != keys[each - 1])
            distinct[number++] = (int64_t)(keys[each] ^ SIGN);
        positions[places[each]] = number - 1;
    }
    return number;
}
