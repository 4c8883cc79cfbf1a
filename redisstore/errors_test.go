package redisstore

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
)

// What servers answer is tested with real ones; these are what comes from the
// network and from libraries.
func TestClassify(t *testing.T) {
	for _, row := range []struct {
		err  error
		want string
	}{
		{context.DeadlineExceeded, edgelimit.StoreTimeout},
		{fmt.Errorf("asking: %w", context.DeadlineExceeded), edgelimit.StoreTimeout},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, edgelimit.StoreNetwork},
		{io.EOF, edgelimit.StoreNetwork},
		{&net.DNSError{IsNotFound: true}, edgelimit.StoreNetwork},
		{&net.DNSError{IsTimeout: true}, edgelimit.StoreTimeout},
		{tls.RecordHeaderError{Msg: "first record does not look like a TLS handshake"}, edgelimit.StoreTLS},
		{&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, edgelimit.StoreTLS},
		{errors.New("something else"), edgelimit.StoreOther},
	} {
		err := classify(row.err, false)
		var storeErr *edgelimit.StoreError
		if !errors.As(err, &storeErr) || storeErr.Kind != row.want || !errors.Is(err, row.err) {
			t.Errorf("%v: got %v, want kind %s and the error itself", row.err, err, row.want)
		}
	}
}
