package main

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
)

// bytesCodec passes messages on as they are, because the requests are encoded already.
type bytesCodec struct{}

func (bytesCodec) Name() string { return "proto" }

func (bytesCodec) Marshal(message any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*message.(*[]byte))}, nil
}

func (bytesCodec) Unmarshal(data mem.BufferSlice, message any) error {
	target := message.(*[]byte)
	*target = (*target)[:0]
	for _, each := range data {
		*target = append(*target, each.ReadOnlyData()...)
	}
	return nil
}

var _ encoding.CodecV2 = bytesCodec{}

// grpcCaller has one call in flight on a connection that it shares with other callers.
type grpcCaller struct {
	connection *grpc.ClientConn
	method     string
	response   []byte
}

func connectGRPC(chosen options) ([]caller, error) {
	connections := make([]*grpc.ClientConn, 0, chosen.connections)
	for range chosen.connections {
		connection, err := grpc.NewClient(
			"passthrough:///"+chosen.target,
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.ForceCodecV2(bytesCodec{})),
		)
		if err != nil {
			return nil, err
		}
		connections = append(connections, connection)
	}
	callers := make([]caller, 0, chosen.callers)
	for place := range chosen.callers {
		each := &grpcCaller{connection: connections[place%len(connections)], method: chosen.method}
		if place < len(connections) { // the first call connects, before the clock runs
			if _, err := each.call(chosen.request); err != nil {
				return nil, fmt.Errorf("%s: %w", chosen.method, err)
			}
		}
		callers = append(callers, each)
	}
	return callers, nil
}

// call returns the bytes of the response message.
func (c *grpcCaller) call(request []byte) ([]byte, error) {
	err := c.connection.Invoke(context.Background(), c.method, &request, &c.response)
	return c.response, err
}
