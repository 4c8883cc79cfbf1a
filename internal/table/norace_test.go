//go:build !race

package table

const floodKeys = 10_000_000
