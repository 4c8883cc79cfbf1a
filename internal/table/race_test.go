//go:build race

package table

// The race detector makes everything slower by an order of magnitude.
const floodKeys = 1_000_000
