//! How many blocks a filter needs.

use super::error::ExistsFilterError;
use super::layout::Layout;

/// The smallest and the largest rate of false positives.
const ERROR_RATES: (f64, f64) = (0.000_001, 0.5);
/// With more keys per block than this, the rate of false positives is larger than 0.7, which is above every allowed rate.
const MAX_KEYS_PER_BLOCK: f64 = 100.0;
/// With at most [`MAX_KEYS_PER_BLOCK`] keys per block on average, practically no block has this many keys.
const POISSON_TERMS: u32 = 512;
/// The steps of the bisection, enough for the precision of an `f64`.
const STEPS: u32 = 60;

/// The number of blocks with which a filter of `capacity` keys has this rate of false positives.
pub(super) fn blocks(capacity: u64, error_rate: f64) -> Result<u32, ExistsFilterError> {
    let (min, max) = ERROR_RATES;
    if capacity == 0 {
        return Err(ExistsFilterError::ZeroCapacity);
    }
    // Also true for NaN.
    if !(min..=max).contains(&error_rate) {
        return Err(ExistsFilterError::ErrorRateOutOfRange { error_rate, min, max });
    }
    let blocks = (capacity as f64 / keys_per_block(error_rate)).ceil();
    if blocks > f64::from(Layout::MAX_BLOCKS) {
        let bytes = blocks * Layout::BLOCK_LEN as f64;
        return Err(ExistsFilterError::TooLarge {
            bytes: bytes as u64,
            max: Layout::new(Layout::MAX_BLOCKS, [0; 16]).bytes(),
        });
    }
    Ok((blocks as u32).max(1))
}

/// Whether the rate of false positives of `blocks` blocks with this number of keys is larger than `error_rate`.
pub(super) fn is_overfull(blocks: u32, keys: u64, error_rate: f64) -> bool {
    let keys_per_block = keys as f64 / f64::from(blocks);
    keys_per_block > MAX_KEYS_PER_BLOCK || false_positives(keys_per_block) > error_rate
}

/// The number of keys per block at which the filter has this rate of false positives.
fn keys_per_block(error_rate: f64) -> f64 {
    let (mut low, mut high) = (0.0, MAX_KEYS_PER_BLOCK);
    for _ in 0..STEPS {
        let middle = f64::midpoint(low, high);
        if false_positives(middle) > error_rate { high = middle } else { low = middle }
    }
    low
}

/// The rate of false positives with this number of keys per block on average.
///
/// The number of keys in a block has a Poisson distribution. With `n` keys, a bit of a word is set with the probability `1 - (31/32)^n`,
/// and a false positive needs such a bit in each of the eight words.
fn false_positives(keys_per_block: f64) -> f64 {
    let (mut probability, mut clear, mut sum) = ((-keys_per_block).exp(), 1.0_f64, 0.0);
    for keys in 0..POISSON_TERMS {
        sum += probability * (1.0 - clear).powi(8);
        probability *= keys_per_block / f64::from(keys + 1);
        clear *= 31.0 / 32.0;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures were measured with two million absent keys.
    #[test]
    fn formula_agrees_with_measurements() {
        for (bits_per_key, measured) in [(9.585, 0.0152), (10.5, 0.0103), (14.4, 0.0023), (16.0, 0.0013)] {
            let rate = false_positives(256.0 / bits_per_key);
            assert!((rate / measured - 1.0).abs() < 0.05, "{bits_per_key} bits: {rate}");
        }
    }

    #[test]
    fn one_percent_needs_less_than_eleven_bits_for_each_key() {
        let bits = f64::from(blocks(1_000_000, 0.01).unwrap()) * 256.0 / 1e6;
        assert!(bits > 10.0 && bits < 11.0, "{bits}");
    }

    #[test]
    fn filter_is_overfull_above_its_capacity() {
        for error_rate in [0.000_001, 0.000_1, 0.01, 0.05, 0.5] {
            for capacity in [100_000, 1_234_567] {
                let blocks = blocks(capacity, error_rate).unwrap();
                assert!(!is_overfull(blocks, 0, error_rate) && !is_overfull(blocks, capacity, error_rate));
                assert!(is_overfull(blocks, capacity + capacity / 100, error_rate), "{capacity} {error_rate}");
                assert!(is_overfull(blocks, 1_000 * capacity, error_rate));
            }
        }
    }

    #[test]
    fn invalid_sizes_are_refused() {
        assert!(matches!(blocks(0, 0.01), Err(ExistsFilterError::ZeroCapacity)));
        for rate in [0.0, -0.1, 1.0, 0.6, 1e-9, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let refused = blocks(1_000, rate);
            assert!(matches!(refused, Err(ExistsFilterError::ErrorRateOutOfRange { .. })), "{refused:?}");
        }
        for capacity in [30_000_000, u64::MAX] {
            let refused = blocks(capacity, 0.01);
            assert!(matches!(refused, Err(ExistsFilterError::TooLarge { max: 33_554_432, .. })), "{refused:?}");
        }
        for rate in [0.000_001, 0.5] {
            assert!(blocks(1, rate).is_ok_and(|blocks| blocks == 1));
        }
        assert!(blocks(25_000_000, 0.01).is_ok());
    }
}
